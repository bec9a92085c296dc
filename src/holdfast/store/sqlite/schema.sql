-- format: 8
-- oldest reader: 8
-- The schema of a store in one file. Instants are microseconds since 1970; JSON is stored as text, so that people can
-- read it. Inside this file a run is identified by run_no, a small integer: keys built on it are a quarter of the size
-- of those built on run_id, and a turn dirties that many fewer pages.

CREATE TABLE runs (
    run_no           INTEGER PRIMARY KEY,          -- in order of creation
    run_id           TEXT NOT NULL UNIQUE,
    tenant           TEXT NOT NULL,
    project          TEXT NOT NULL,
    environment      TEXT NOT NULL,
    plan_id          TEXT NOT NULL,
    plan_version     TEXT NOT NULL,
    run_request_id   TEXT NOT NULL,
    request_key      BLOB NOT NULL UNIQUE,         -- SHA256: a request creates one run (QUE-1)
    input_sha256     BLOB NOT NULL,
    parent_run_id    TEXT,
    reference_key    TEXT,
    tags             TEXT NOT NULL,                -- JSON array
    status           TEXT NOT NULL,
    version          INTEGER NOT NULL,             -- run_seq of the last event
    snapshot         TEXT,                         -- JSON RuntimeSnapshot: a cache of the fold
    created_at       INTEGER NOT NULL,
    updated_at       INTEGER NOT NULL,
    finished_at      INTEGER,
    inbox_seq        INTEGER NOT NULL DEFAULT 0,   -- number of the last signal accepted
    last_accepted_at INTEGER NOT NULL DEFAULT 0,
    ready_at         INTEGER,                      -- when a turn is due; NULL: nothing is in sight
    lease_owner      TEXT,
    lease_epoch      INTEGER NOT NULL DEFAULT 0,
    queued_at        INTEGER,                      -- since when it is queued for admission; NULL: it is not
    losses           INTEGER NOT NULL DEFAULT 0    -- nodes that were lost while they owned it, since its last turn
);
CREATE INDEX runs_free ON runs (ready_at) WHERE lease_owner IS NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_owned ON runs (lease_owner) WHERE lease_owner IS NOT NULL;
CREATE INDEX runs_owned_ready ON runs (lease_owner, ready_at) WHERE lease_owner IS NOT NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_parent ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_reference ON runs (reference_key) WHERE reference_key IS NOT NULL;

-- Deliberately a rowid table: histories of many runs grow at once, and appending to one end dirties the fewest pages.
CREATE TABLE events (
    run_no              INTEGER NOT NULL,
    run_seq             INTEGER NOT NULL,
    event_id            TEXT NOT NULL,
    event_type          TEXT NOT NULL,
    step_id             TEXT,
    engine_attempt_id   INTEGER,
    logical_attempt_id  INTEGER,
    data                TEXT NOT NULL,             -- JSON
    idempotency_key     BLOB NOT NULL,             -- SHA256 (EVT-4)
    emitted_at          INTEGER NOT NULL,
    persisted_at        INTEGER NOT NULL,
    adapter_version     TEXT NOT NULL,
    engine_run_ref      TEXT NOT NULL,             -- JSON
    caused_by_signal_id TEXT,
    parent_event_id     TEXT,
    schema_version      INTEGER NOT NULL,
    PRIMARY KEY (run_no, run_seq),
    UNIQUE (run_no, idempotency_key)
);

CREATE TABLE messages (
    run_no    INTEGER NOT NULL,
    signal_id TEXT NOT NULL,
    due_at    INTEGER NOT NULL,
    message   TEXT NOT NULL,                       -- JSON Message
    PRIMARY KEY (run_no, signal_id)
) WITHOUT ROWID;
CREATE INDEX messages_due ON messages (run_no, due_at);

CREATE TABLE signals (
    run_no       INTEGER NOT NULL,
    inbox_seq    INTEGER NOT NULL,
    name         TEXT NOT NULL,
    signal_id    TEXT NOT NULL,
    step_id      TEXT,
    accepted_at  INTEGER NOT NULL,                 -- strictly grows with inbox_seq
    received_at  INTEGER NOT NULL,                 -- what the clock said; the rate limit counts by it
    consumed_seq INTEGER,                          -- run_seq of the event that consumed it
    payload      TEXT NOT NULL,                    -- JSON
    by_caller    TEXT,                             -- JSON CallerRef: who sent it through a service
    PRIMARY KEY (run_no, inbox_seq)
) WITHOUT ROWID;
CREATE INDEX signals_unconsumed ON signals (run_no, name) WHERE consumed_seq IS NULL;
CREATE INDEX signals_by_id ON signals (run_no, name, signal_id, accepted_at);

CREATE TABLE acceptance_records (
    run_no     INTEGER NOT NULL,
    name       TEXT NOT NULL,
    signal_id  TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    record     TEXT NOT NULL,                      -- JSON AcceptanceRecord
    PRIMARY KEY (run_no, name, signal_id)
) WITHOUT ROWID;
CREATE INDEX acceptance_records_expiry ON acceptance_records (expires_at);

CREATE TABLE waits (
    run_no  INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    name    TEXT NOT NULL,
    token   TEXT NOT NULL,
    since   INTEGER NOT NULL,
    until   INTEGER,
    PRIMARY KEY (run_no, step_id)
) WITHOUT ROWID;
CREATE INDEX waits_by_name ON waits (name, run_no);

CREATE TABLE tasks (
    task_id  TEXT NOT NULL PRIMARY KEY,
    run_no   INTEGER NOT NULL,
    step_id  TEXT NOT NULL,
    status   TEXT NOT NULL,
    assignee TEXT,
    roles    TEXT NOT NULL,                        -- JSON array
    task     TEXT NOT NULL                         -- JSON Task
) WITHOUT ROWID;
CREATE UNIQUE INDEX tasks_open ON tasks (run_no, step_id) WHERE status = 'OPEN';
CREATE INDEX tasks_by_run ON tasks (run_no);

CREATE TABLE activity_records (
    run_no          INTEGER NOT NULL,
    activity_name   TEXT NOT NULL,
    step_id         TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    is_completed    INTEGER NOT NULL,
    record          TEXT NOT NULL,                 -- JSON ActivityRecord
    PRIMARY KEY (run_no, activity_name, step_id, idempotency_key)
) WITHOUT ROWID;
CREATE INDEX activity_records_open ON activity_records (run_no, activity_name, step_id) WHERE NOT is_completed;

CREATE TABLE nodes (
    node        TEXT NOT NULL PRIMARY KEY,
    lease_until INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX nodes_lease ON nodes (lease_until);

-- Which nodes can run which definitions, as far as they have published that.
CREATE TABLE node_plans (
    node  TEXT NOT NULL PRIMARY KEY,
    plans TEXT NOT NULL                            -- JSON array; each is a plan's id, a line break, and its version
) WITHOUT ROWID;

CREATE TRIGGER node_plans_leave AFTER DELETE ON nodes
BEGIN
    DELETE FROM node_plans WHERE node = OLD.node;
END;

-- Activities in queues, and the progress that activities have reported.
CREATE TABLE jobs (
    run_no       INTEGER NOT NULL,
    step_id      TEXT NOT NULL,
    queue        TEXT NOT NULL,                    -- '': carried out by the run's owner; there are only details
    activity     TEXT NOT NULL,
    visible_at   INTEGER,                          -- when it may be taken; NULL: never
    taken_by     TEXT,                             -- node of the last take
    next_attempt INTEGER NOT NULL,                 -- engine_attempt_id of the next take
    details      TEXT,                             -- JSON
    job          TEXT,                             -- JSON Job
    PRIMARY KEY (run_no, step_id)
) WITHOUT ROWID;
-- In the order in which jobs are acquired. The activity is included so that jobs unknown to a node cost little.
CREATE INDEX jobs_visible ON jobs (queue, visible_at, run_no, step_id, activity) WHERE visible_at IS NOT NULL;

-- A trigger, because a run's number may be reused. A trigger on their end would cost every turn a fifth of its time.
CREATE TRIGGER jobs_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM jobs WHERE run_no = OLD.run_no;
END;

-- Finds tasks by who they are for and when they are due.
CREATE INDEX tasks_by_assignee ON tasks (assignee, status, task_id) WHERE assignee IS NOT NULL;
CREATE INDEX tasks_by_due ON tasks (status, json_extract(task, '$.due_at'));

CREATE TABLE task_roles (
    role    NOT NULL,                              -- text; the number 0 for a task that names no role
    status  TEXT NOT NULL,
    task_id TEXT NOT NULL,
    PRIMARY KEY (role, status, task_id)
) WITHOUT ROWID;
CREATE INDEX task_roles_of_task ON task_roles (task_id);

CREATE TRIGGER task_roles_insert AFTER INSERT ON tasks
BEGIN
    INSERT INTO task_roles SELECT DISTINCT value, NEW.status, NEW.task_id FROM json_each(NEW.roles);
    INSERT INTO task_roles SELECT 0, NEW.status, NEW.task_id WHERE NEW.roles = '[]';
END;
CREATE TRIGGER task_roles_update AFTER UPDATE ON tasks
BEGIN
    DELETE FROM task_roles WHERE task_id = OLD.task_id;
    INSERT INTO task_roles SELECT DISTINCT value, NEW.status, NEW.task_id FROM json_each(NEW.roles);
    INSERT INTO task_roles SELECT 0, NEW.status, NEW.task_id WHERE NEW.roles = '[]';
END;
CREATE TRIGGER task_roles_delete AFTER DELETE ON tasks
BEGIN
    DELETE FROM task_roles WHERE task_id = OLD.task_id;
END;

-- Messages that could not be handled, kept until an operator has settled them and their run is purged.
CREATE TABLE dead_letters (
    letter_id  TEXT NOT NULL PRIMARY KEY,
    run_no     INTEGER NOT NULL,
    reason     TEXT NOT NULL,
    detail     TEXT NOT NULL,
    node       TEXT NOT NULL,
    died_at    INTEGER NOT NULL,
    settled    TEXT,                               -- NULL: it is open
    settled_by TEXT NOT NULL DEFAULT '',
    settled_at INTEGER,
    envelope   BLOB NOT NULL                       -- JSON Message, or the bytes that were found instead
) WITHOUT ROWID;
CREATE INDEX dead_letters_open ON dead_letters (died_at, letter_id) WHERE settled IS NULL;
CREATE INDEX dead_letters_by_run ON dead_letters (run_no, died_at, letter_id);

-- A trigger, because a run's number may be reused.
CREATE TRIGGER dead_letters_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM dead_letters WHERE run_no = OLD.run_no;
END;

-- Access tokens of a service: their data, not the tokens themselves.
CREATE TABLE access_tokens (
    token_id     TEXT NOT NULL PRIMARY KEY,
    tenant       TEXT,                             -- NULL: for all tenants
    session_of   TEXT,                             -- NULL: no session
    expires_at   INTEGER,
    revoked_at   INTEGER,
    revoked_by   TEXT NOT NULL DEFAULT '',
    last_used_at INTEGER,
    token        TEXT NOT NULL                     -- JSON AccessToken, as it was made
) WITHOUT ROWID;
CREATE INDEX access_tokens_sessions ON access_tokens (expires_at) WHERE session_of IS NOT NULL;

-- Admission queues of workflows with limits (`core/admission.py`): the queued runs, and the admitted ones.
CREATE TABLE gates (
    plan_id     TEXT NOT NULL PRIMARY KEY,
    inside      INTEGER NOT NULL DEFAULT 0,
    per_key     INTEGER NOT NULL,                  -- as it was last used; 2^62: no limit
    last_tenant TEXT NOT NULL DEFAULT '',          -- of the run that was admitted last
    last_start  INTEGER NOT NULL DEFAULT 0,        -- number of the last row in gate_starts
    starting    INTEGER NOT NULL DEFAULT 0         -- how many were admitted under a rate and have yet to start
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
    place     INTEGER NOT NULL,                    -- its rank: the lowest is first in its line
    is_inside INTEGER NOT NULL DEFAULT 0,
    is_starting INTEGER NOT NULL DEFAULT 0         -- admitted under a rate, and has yet to start
);
CREATE INDEX gate_runs_waiting ON gate_runs (plan_id, tenant, key, place, run_no) WHERE NOT is_inside;
CREATE INDEX gate_runs_inside ON gate_runs (plan_id, run_no) WHERE is_inside;

-- One row for each tenant and key with runs: how many of them are admitted, and which queued one is first.
CREATE TABLE gate_lines (
    plan_id TEXT NOT NULL,
    tenant  TEXT NOT NULL,
    key     TEXT NOT NULL,
    inside  INTEGER NOT NULL DEFAULT 0,
    per_key INTEGER NOT NULL,                      -- that of `gates`
    place   INTEGER,
    run_no  INTEGER,
    PRIMARY KEY (plan_id, tenant, key)
) WITHOUT ROWID;
CREATE INDEX gate_lines_open ON gate_lines (plan_id, tenant, place, run_no) WHERE place IS NOT NULL AND inside < per_key;

-- Triggers keep the counts and the first run of each line. A run's number may be reused: a purged run leaves, too.
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
CREATE TRIGGER gate_runs_start AFTER UPDATE OF is_starting ON gate_runs WHEN NEW.is_starting <> OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting + NEW.is_starting - OLD.is_starting WHERE plan_id = NEW.plan_id;
END;
CREATE TRIGGER gate_runs_never_start AFTER DELETE ON gate_runs WHEN OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting - 1 WHERE plan_id = OLD.plan_id;
END;

-- The audit log: what operators have done.
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

CREATE TABLE definitions (
    plan_id      TEXT NOT NULL,
    plan_version TEXT NOT NULL,
    definition   TEXT NOT NULL,                           -- JSON PublishedDefinition: what the version declares
    PRIMARY KEY (plan_id, plan_version)
) WITHOUT ROWID;
