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
