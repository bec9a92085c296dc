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
-- The event bus: sinks, what each of them has yet to get, alerts, and what was given up. See `core/bus.py`.

CREATE TABLE holdfast.sinks (
    sink_no      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text COLLATE "C" NOT NULL UNIQUE,
    tenant       text COLLATE "C",                 -- NULL: of all tenants
    workflows    text[] COLLATE "C",               -- NULL: all
    alerts       boolean NOT NULL,                 -- whether it gets alerts
    sink         text NOT NULL,                    -- JSON Sink
    failures     bigint NOT NULL DEFAULT 0,        -- in a row
    due_at       bigint NOT NULL DEFAULT 0,        -- until then it is left alone
    error        text NOT NULL DEFAULT '',
    failed_at    bigint,
    delivered_at bigint,
    delivered    bigint NOT NULL DEFAULT 0
);

-- One entry for each turn and sink: events from one number to another. The trigger that records growth writes them, so
-- that every commit does, also that of a node which does not know of sinks. Commits insert, and relays alone delete.
CREATE TABLE holdfast.outbox (
    sink_no  bigint NOT NULL,
    run_no   bigint NOT NULL,                      -- 0: alerts
    from_seq bigint NOT NULL,
    to_seq   bigint NOT NULL,
    at       bigint NOT NULL,
    attempts bigint NOT NULL,
    due_at   bigint NOT NULL,
    PRIMARY KEY (sink_no, run_no, from_seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE holdfast.alerts (
    alert_no  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    alert_id  text COLLATE "C" NOT NULL UNIQUE,
    raised_at bigint NOT NULL,
    alert     text NOT NULL                        -- JSON BusAlert
);

CREATE TABLE holdfast.bus_dead_letters (
    letter_id text COLLATE "C" NOT NULL PRIMARY KEY,
    sink_no   bigint NOT NULL,
    run_no    bigint NOT NULL,                     -- 0: alerts
    run_id    text COLLATE "C" NOT NULL,
    from_seq  bigint NOT NULL,
    to_seq    bigint NOT NULL,
    attempts  bigint NOT NULL,
    detail    text NOT NULL,
    died_at   bigint NOT NULL
);
CREATE INDEX bus_dead_letters_by_time ON holdfast.bus_dead_letters (died_at, letter_id);
CREATE INDEX bus_dead_letters_by_run ON holdfast.bus_dead_letters (run_no);


-- Search attributes of runs, a row for each value: number for numbers, truth values (0, 1) and instants, word for text.

CREATE TABLE holdfast.run_attributes (
    run_no bigint NOT NULL,
    name   text COLLATE "C" NOT NULL,
    kind   text COLLATE "C" NOT NULL,              -- s text, n number, b truth value, t instant
    number double precision,
    word   text COLLATE "C"
);
CREATE INDEX run_attributes_run ON holdfast.run_attributes (run_no, name);
CREATE INDEX run_attributes_number ON holdfast.run_attributes (name, kind, number, run_no) WHERE number IS NOT NULL;
CREATE INDEX run_attributes_word ON holdfast.run_attributes (name, kind, word, run_no) WHERE word IS NOT NULL;


-- Schedules: one row each, with the revision from which it is changed.

CREATE TABLE holdfast.schedules (
    tenant      text COLLATE "C" NOT NULL,
    project     text COLLATE "C" NOT NULL,
    environment text COLLATE "C" NOT NULL,
    schedule_id text COLLATE "C" NOT NULL,
    app         text COLLATE "C" NOT NULL,
    workflow    text COLLATE "C" NOT NULL,
    next_due    bigint,                            -- NULL while it is paused, and after its end
    is_waiting  boolean NOT NULL,                  -- it has ticks that wait for the run before
    revision    bigint NOT NULL,
    body        text NOT NULL,                     -- all of it, as JSON; the input is sealed, if payloads are
    PRIMARY KEY (tenant, project, environment, schedule_id)
);
CREATE INDEX schedules_due ON holdfast.schedules (app, next_due) WHERE next_due IS NOT NULL;
