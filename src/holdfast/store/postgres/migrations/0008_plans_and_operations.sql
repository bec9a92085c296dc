-- oldest reader: 7
-- Plans: their bodies by hash, the versions that are registered, and which run needs which body.

CREATE TABLE holdfast.plan_bodies (
    tenant text COLLATE "C" NOT NULL,
    sha256 bytea NOT NULL,
    body   bytea NOT NULL,                         -- as it was given; sealed, if payloads are
    put_at bigint NOT NULL,                        -- when it was given last
    PRIMARY KEY (tenant, sha256)
);

CREATE TABLE holdfast.plans (
    tenant        text COLLATE "C" NOT NULL,
    plan_id       text COLLATE "C" NOT NULL,
    plan_version  text COLLATE "C" NOT NULL,
    sha256        bytea NOT NULL,
    uri           text NOT NULL,
    registered_by text NOT NULL,
    registered_at bigint NOT NULL,
    PRIMARY KEY (tenant, plan_id, plan_version)
);
CREATE INDEX plans_by_body ON holdfast.plans (tenant, sha256);

CREATE TABLE holdfast.plan_uses (
    run_no bigint PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    sha256 bytea NOT NULL
);
CREATE INDEX plan_uses_by_body ON holdfast.plan_uses (tenant, sha256);

-- Retention: where the histories of deleted runs are archived, and dead letters in the order in which they were settled.
CREATE TABLE holdfast.archived_runs (
    run_id       text COLLATE "C" NOT NULL,
    tenant       text COLLATE "C" NOT NULL,
    project      text COLLATE "C" NOT NULL,
    environment  text COLLATE "C" NOT NULL,
    plan_id      text COLLATE "C" NOT NULL,
    plan_version text COLLATE "C" NOT NULL,
    status       text NOT NULL,
    version      bigint NOT NULL,
    created_at   bigint NOT NULL,                  -- an id may be used again: with this, it is one run
    finished_at  bigint NOT NULL,
    object_key   text NOT NULL,                    -- where in the archive
    "offset"     bigint NOT NULL,                  -- of the run within the object, and how long it is
    size_bytes   bigint NOT NULL,
    archived_at  bigint NOT NULL,
    PRIMARY KEY (run_id, created_at)
);
CREATE INDEX archived_runs_finished ON holdfast.archived_runs (finished_at, run_id);
CREATE INDEX archived_runs_age ON holdfast.archived_runs (archived_at, run_id);
CREATE INDEX dead_letters_settled ON holdfast.dead_letters (settled_at, letter_id) WHERE settled IS NOT NULL;

-- Host locks: what only one node may do at a time.

CREATE TABLE holdfast.host_locks (
    name        text COLLATE "C" PRIMARY KEY,
    owner       text COLLATE "C",                  -- NULL once it is released
    epoch       bigint NOT NULL,
    acquired_at bigint NOT NULL,
    lease_until bigint NOT NULL
);
