-- oldest reader: 1
-- Nodes that have several lives, turns that are counted, and what else an audit asked for. Tables that older releases
-- insert into without naming columns (nodes, tasks, jobs, gate_starts, node_plans) get no columns: what is new of
-- them stands in tables beside.

CREATE TABLE node_lives (
    node TEXT PRIMARY KEY NOT NULL,
    life TEXT NOT NULL                                    -- which life of the node its lease is of
) WITHOUT ROWID;
