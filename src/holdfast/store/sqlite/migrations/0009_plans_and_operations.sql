-- oldest reader: 8
-- Plans: their bodies by hash, the versions that are registered, and which run needs which body.

CREATE TABLE plan_bodies (
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL,
    body   BLOB NOT NULL,                          -- as it was given; sealed, if payloads are
    put_at INTEGER NOT NULL,                       -- when it was given last
    PRIMARY KEY (tenant, sha256)
);

CREATE TABLE plans (
    tenant        TEXT NOT NULL,
    plan_id       TEXT NOT NULL,
    plan_version  TEXT NOT NULL,
    sha256        BLOB NOT NULL,
    uri           TEXT NOT NULL,
    registered_by TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    PRIMARY KEY (tenant, plan_id, plan_version)
) WITHOUT ROWID;
CREATE INDEX plans_by_body ON plans (tenant, sha256);

CREATE TABLE plan_uses (
    run_no INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL
);
CREATE INDEX plan_uses_by_body ON plan_uses (tenant, sha256);

-- Retention: where the histories of deleted runs are archived, and dead letters in the order in which they were settled.
CREATE TABLE archived_runs (
    run_id       TEXT NOT NULL,
    tenant       TEXT NOT NULL,
    project      TEXT NOT NULL,
    environment  TEXT NOT NULL,
    plan_id      TEXT NOT NULL,
    plan_version TEXT NOT NULL,
    status       TEXT NOT NULL,
    version      INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,                 -- an id may be used again: with this, it is one run
    finished_at  INTEGER NOT NULL,
    object_key   TEXT NOT NULL,                    -- where in the archive
    "offset"     INTEGER NOT NULL,                 -- of the run within the object, and how long it is
    size_bytes   INTEGER NOT NULL,
    archived_at  INTEGER NOT NULL,
    PRIMARY KEY (run_id, created_at)
) WITHOUT ROWID;
CREATE INDEX archived_runs_finished ON archived_runs (finished_at, run_id);
CREATE INDEX archived_runs_age ON archived_runs (archived_at, run_id);
CREATE INDEX dead_letters_settled ON dead_letters (settled_at, letter_id) WHERE settled IS NOT NULL;

-- Host locks: what only one node may do at a time.

CREATE TABLE host_locks (
    name        TEXT PRIMARY KEY,
    owner       TEXT,                              -- NULL once it is released
    epoch       INTEGER NOT NULL,
    acquired_at INTEGER NOT NULL,
    lease_until INTEGER NOT NULL
) WITHOUT ROWID;
-- The event bus: sinks, what each of them has yet to get, alerts, and what was given up. See `core/bus.py`.

CREATE TABLE sinks (
    sink_no      INTEGER PRIMARY KEY AUTOINCREMENT,
    name         TEXT NOT NULL UNIQUE,
    tenant       TEXT,                             -- NULL: of all tenants
    workflows    TEXT,                             -- JSON array; NULL: all
    alerts       INTEGER NOT NULL,                 -- whether it gets alerts
    sink         TEXT NOT NULL,                    -- JSON Sink
    failures     INTEGER NOT NULL DEFAULT 0,       -- in a row
    due_at       INTEGER NOT NULL DEFAULT 0,       -- until then it is left alone
    error        TEXT NOT NULL DEFAULT '',
    failed_at    INTEGER,
    delivered_at INTEGER,
    delivered    INTEGER NOT NULL DEFAULT 0
);

-- One entry for each turn and sink: events from one number to another. Triggers on `runs` write them, so that every commit
-- does, also that of a node which does not know of sinks. They exist while there is a sink (`bus.py`): they would cost
-- every turn of those who have none a twenty-fifth of its instructions.
CREATE TABLE outbox (
    sink_no  INTEGER NOT NULL,
    run_no   INTEGER NOT NULL,                     -- 0: alerts
    from_seq INTEGER NOT NULL,
    to_seq   INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    due_at   INTEGER NOT NULL,
    PRIMARY KEY (sink_no, run_no, from_seq)
) WITHOUT ROWID;

CREATE TABLE alerts (
    alert_no  INTEGER PRIMARY KEY AUTOINCREMENT,
    alert_id  TEXT NOT NULL UNIQUE,
    raised_at INTEGER NOT NULL,
    alert     TEXT NOT NULL                        -- JSON BusAlert
);

CREATE TABLE bus_dead_letters (
    letter_id TEXT NOT NULL PRIMARY KEY,
    sink_no   INTEGER NOT NULL,
    run_no    INTEGER NOT NULL,                    -- 0: alerts
    run_id    TEXT NOT NULL,
    from_seq  INTEGER NOT NULL,
    to_seq    INTEGER NOT NULL,
    attempts  INTEGER NOT NULL,
    detail    TEXT NOT NULL,
    died_at   INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX bus_dead_letters_by_time ON bus_dead_letters (died_at, letter_id);
CREATE INDEX bus_dead_letters_by_run ON bus_dead_letters (run_no);

CREATE TRIGGER sinks_remove AFTER DELETE ON sinks
BEGIN
    DELETE FROM outbox WHERE sink_no = OLD.sink_no;
    DELETE FROM bus_dead_letters WHERE sink_no = OLD.sink_no;
END;
CREATE TRIGGER outbox_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM outbox WHERE sink_no IN (SELECT sink_no FROM sinks) AND run_no = OLD.run_no;
    DELETE FROM bus_dead_letters WHERE run_no = OLD.run_no;
END;


-- Search attributes of runs, a row for each value: number for numbers, truth values (0, 1) and instants, word for text.

CREATE TABLE run_attributes (
    run_no INTEGER NOT NULL,
    name   TEXT NOT NULL,
    kind   TEXT NOT NULL,                          -- s text, n number, b truth value, t instant
    number REAL,
    word   TEXT
);
CREATE INDEX run_attributes_run ON run_attributes (run_no, name);
CREATE INDEX run_attributes_number ON run_attributes (name, kind, number, run_no) WHERE number IS NOT NULL;
CREATE INDEX run_attributes_word ON run_attributes (name, kind, word, run_no) WHERE word IS NOT NULL;


-- Schedules: one row each, with the revision from which it is changed.

CREATE TABLE schedules (
    tenant      TEXT NOT NULL,
    project     TEXT NOT NULL,
    environment TEXT NOT NULL,
    schedule_id TEXT NOT NULL,
    app         TEXT NOT NULL,
    workflow    TEXT NOT NULL,
    next_due    INTEGER,                           -- NULL while it is paused, and after its end
    is_waiting  INTEGER NOT NULL,                  -- it has ticks that wait for the run before
    revision    INTEGER NOT NULL,
    body        TEXT NOT NULL,                     -- all of it, as JSON; the input is sealed, if payloads are
    PRIMARY KEY (tenant, project, environment, schedule_id)
) WITHOUT ROWID;
CREATE INDEX schedules_due ON schedules (app, next_due) WHERE next_due IS NOT NULL;
