-- oldest reader: 7
-- Losses of runs, the audit log, keys of the store, starts under a rate, and what workflows declare.

ALTER TABLE holdfast.runs ADD COLUMN losses bigint NOT NULL DEFAULT 0;   -- nodes that went away with it since its last turn

-- By name: of a large mailbox only what open waits can take is read.
DROP INDEX holdfast.signals_unconsumed;
CREATE INDEX signals_unconsumed ON holdfast.signals (run_no, name, inbox_seq) WHERE consumed_seq IS NULL;
ALTER TABLE holdfast.signals ADD COLUMN by_caller text;   -- JSON CallerRef: who sent it through a service

CREATE TABLE holdfast.audit_log (
    at          bigint NOT NULL,
    entry_id    text COLLATE "C" NOT NULL,
    tenant      text COLLATE "C",                         -- NULL: about no tenant
    project     text,
    environment text,
    run_id      text COLLATE "C",
    actor       text COLLATE "C" NOT NULL,
    token_id    text COLLATE "C",
    operation   text COLLATE "C" NOT NULL,
    entry       text NOT NULL,                            -- JSON AuditEntry, as it was given
    PRIMARY KEY (at, entry_id)
);
CREATE INDEX audit_log_by_tenant ON holdfast.audit_log (tenant, at) WHERE tenant IS NOT NULL;
CREATE INDEX audit_log_by_run ON holdfast.audit_log (run_id, at) WHERE run_id IS NOT NULL;
CREATE INDEX audit_log_by_actor ON holdfast.audit_log (actor, at);
CREATE INDEX audit_log_by_token ON holdfast.audit_log (token_id, at) WHERE token_id IS NOT NULL;
CREATE INDEX audit_log_by_operation ON holdfast.audit_log (operation, at);

CREATE TABLE holdfast.store_keys (
    name text PRIMARY KEY,                                -- what the key is for
    key bytea NOT NULL                                    -- 32 bytes, secret
);

-- Runs that were admitted under a rate and have yet to start use up what the rate allows. A start takes no lock of the
-- gate: the number of the run stands in gate_started until the next holder of that lock counts it.
ALTER TABLE holdfast.gate_runs ADD COLUMN is_starting boolean NOT NULL DEFAULT false;
ALTER TABLE holdfast.gates ADD COLUMN starting bigint NOT NULL DEFAULT 0;
CREATE TABLE holdfast.gate_started (
    plan_id    text COLLATE "C" NOT NULL,
    number     bigint NOT NULL,
    started_at bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE holdfast.definitions (
    plan_id      text COLLATE "C" NOT NULL,
    plan_version text COLLATE "C" NOT NULL,
    definition   text NOT NULL,                           -- JSON PublishedDefinition: what the version declares
    PRIMARY KEY (plan_id, plan_version)
);
