-- oldest reader: 8
-- Losses of runs, the audit log, keys of the store, starts under a rate, and what workflows declare. Tables that older
-- releases insert into without naming columns (nodes, tasks, jobs, gate_starts, node_plans) get no columns.

ALTER TABLE runs ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;   -- nodes that went away with it since its last turn
ALTER TABLE signals ADD COLUMN by_caller TEXT;            -- JSON CallerRef: who sent it through a service

CREATE TABLE audit_log (
    at          INTEGER NOT NULL,
    entry_id    TEXT NOT NULL,
    tenant      TEXT,                                     -- NULL: about no tenant
    project     TEXT,
    environment TEXT,
    run_id      TEXT,
    actor       TEXT NOT NULL,
    token_id    TEXT,
    operation   TEXT NOT NULL,
    entry       TEXT NOT NULL,                            -- JSON AuditEntry, as it was given
    PRIMARY KEY (at, entry_id)
) WITHOUT ROWID;
CREATE INDEX audit_log_by_tenant ON audit_log (tenant, at) WHERE tenant IS NOT NULL;
CREATE INDEX audit_log_by_run ON audit_log (run_id, at) WHERE run_id IS NOT NULL;
CREATE INDEX audit_log_by_actor ON audit_log (actor, at);
CREATE INDEX audit_log_by_token ON audit_log (token_id, at) WHERE token_id IS NOT NULL;
CREATE INDEX audit_log_by_operation ON audit_log (operation, at);

CREATE TABLE store_keys (
    name TEXT PRIMARY KEY NOT NULL,                       -- what the key is for
    key BLOB NOT NULL                                     -- 32 bytes, secret
) WITHOUT ROWID;

-- Runs that were admitted under a rate and have yet to start use up what the rate allows.
ALTER TABLE gate_runs ADD COLUMN is_starting INTEGER NOT NULL DEFAULT 0;
ALTER TABLE gates ADD COLUMN starting INTEGER NOT NULL DEFAULT 0;
CREATE TRIGGER gate_runs_start AFTER UPDATE OF is_starting ON gate_runs WHEN NEW.is_starting <> OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting + NEW.is_starting - OLD.is_starting WHERE plan_id = NEW.plan_id;
END;
CREATE TRIGGER gate_runs_never_start AFTER DELETE ON gate_runs WHEN OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting - 1 WHERE plan_id = OLD.plan_id;
END;

CREATE TABLE definitions (
    plan_id      TEXT NOT NULL,
    plan_version TEXT NOT NULL,
    definition   TEXT NOT NULL,                           -- JSON PublishedDefinition: what the version declares
    PRIMARY KEY (plan_id, plan_version)
) WITHOUT ROWID;
