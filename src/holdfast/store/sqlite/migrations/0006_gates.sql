-- oldest reader: 1
-- The gates of workflows with limits: who waits to be let in, and who is inside.

ALTER TABLE runs ADD COLUMN queued_at INTEGER;     -- since when it waits at its gate; NULL: it does not

CREATE TABLE gates (
    plan_id     TEXT NOT NULL PRIMARY KEY,
    inside      INTEGER NOT NULL DEFAULT 0,
    per_key     INTEGER NOT NULL,                  -- as it was last used; 2^62: no limit
    last_tenant TEXT NOT NULL DEFAULT '',          -- of whom a run was let in last
    last_start  INTEGER NOT NULL DEFAULT 0         -- number of the last row in gate_starts
) WITHOUT ROWID;

CREATE TABLE gate_starts (
    plan_id   TEXT NOT NULL,
    number    INTEGER NOT NULL,
    starts_at INTEGER NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITHOUT ROWID;

CREATE TABLE gate_runs (
    run_no    INTEGER PRIMARY KEY,
    plan_id   TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    key       TEXT NOT NULL,
    place     INTEGER NOT NULL,                    -- the least is first in its line
    is_inside INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX gate_runs_waiting ON gate_runs (plan_id, tenant, key, place, run_no) WHERE NOT is_inside;
CREATE INDEX gate_runs_inside ON gate_runs (plan_id, run_no) WHERE is_inside;

-- One row for each tenant and key of which runs wait or are inside: how many are, and who is first in line.
CREATE TABLE gate_lines (
    plan_id TEXT NOT NULL,
    tenant  TEXT NOT NULL,
    key     TEXT NOT NULL,
    inside  INTEGER NOT NULL DEFAULT 0,
    per_key INTEGER NOT NULL,                      -- that of its gate
    place   INTEGER,
    run_no  INTEGER,
    PRIMARY KEY (plan_id, tenant, key)
) WITHOUT ROWID;
CREATE INDEX gate_lines_open ON gate_lines (plan_id, tenant, place, run_no) WHERE place IS NOT NULL AND inside < per_key;

-- Triggers, because a run's number may be used again, and older nodes that share the file do not know of gates.
CREATE TRIGGER gate_runs_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM gate_runs WHERE run_no = OLD.run_no;
END;
CREATE TRIGGER gate_runs_come AFTER INSERT ON gate_runs
BEGIN
    INSERT OR IGNORE INTO gate_lines (plan_id, tenant, key, per_key)
        SELECT NEW.plan_id, NEW.tenant, NEW.key, per_key FROM gates WHERE plan_id = NEW.plan_id;
    UPDATE gate_lines SET inside = inside + NEW.is_inside
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
END;
CREATE TRIGGER gate_runs_let_in AFTER UPDATE OF is_inside ON gate_runs
BEGIN
    UPDATE gates SET inside = inside + NEW.is_inside - OLD.is_inside WHERE plan_id = NEW.plan_id;
    UPDATE gate_lines SET inside = inside + NEW.is_inside - OLD.is_inside
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
END;
CREATE TRIGGER gate_runs_leave AFTER DELETE ON gate_runs
BEGIN
    UPDATE runs SET queued_at = NULL WHERE run_no = OLD.run_no;
    UPDATE gates SET inside = inside - OLD.is_inside WHERE plan_id = OLD.plan_id;
    UPDATE gate_lines SET inside = inside - OLD.is_inside
        WHERE plan_id = OLD.plan_id AND tenant = OLD.tenant AND key = OLD.key;
END;
CREATE TRIGGER gate_lines_first AFTER UPDATE OF inside ON gate_lines
BEGIN
    UPDATE gate_lines SET (place, run_no) = (
        SELECT place, run_no FROM gate_runs
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key AND NOT is_inside
        ORDER BY place, run_no LIMIT 1
    )
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
    DELETE FROM gate_lines
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key AND inside = 0 AND place IS NULL;
END;
