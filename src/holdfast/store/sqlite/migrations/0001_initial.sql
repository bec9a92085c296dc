-- oldest reader: 1
-- The first schema. Instants are microseconds since 1970; JSON is kept as text, so that a person can read it.
-- A run is known inside this file by run_no, a small integer: keys built on it are a quarter of the size of those
-- built on run_id, and a turn dirties that many fewer pages.

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
    lease_epoch      INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX runs_free ON runs (ready_at) WHERE lease_owner IS NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_owned ON runs (lease_owner) WHERE lease_owner IS NOT NULL;
CREATE INDEX runs_owned_ready ON runs (lease_owner, ready_at) WHERE lease_owner IS NOT NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_parent ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_reference ON runs (reference_key) WHERE reference_key IS NOT NULL;

-- A rowid table on purpose: histories of many runs grow at once, and appending to one end dirties the fewest pages.
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
