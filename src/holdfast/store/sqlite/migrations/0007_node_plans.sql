-- oldest reader: 1
-- What nodes can run, as far as they say so. A table of its own: older nodes that share the file fill `nodes` by place.

CREATE TABLE node_plans (
    node  TEXT NOT NULL PRIMARY KEY,
    plans TEXT NOT NULL                            -- JSON array; each is a plan's id, a line break, and its version
) WITHOUT ROWID;

CREATE TRIGGER node_plans_leave AFTER DELETE ON nodes
BEGIN
    DELETE FROM node_plans WHERE node = OLD.node;
END;
