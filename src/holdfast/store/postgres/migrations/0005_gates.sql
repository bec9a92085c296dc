-- oldest reader: 1
-- The gates of workflows with limits: who waits to be let in, and who is inside.
--
-- Everything of a gate is written under the lock of its row in `gates`. These locks are taken in the order of the
-- plans' names, and before the lock of any run. Leaving takes none: a run that finishes puts its number into
-- `gate_exits`, whichever version of `commit` it was, and whoever next holds the gate's lock counts it out.

ALTER TABLE holdfast.runs ADD COLUMN queued_at bigint;    -- since when it waits at its gate; NULL: it does not
ALTER TABLE holdfast.runs ADD COLUMN gate_no bigint;      -- its place at the gate of its plan; NULL: it needs none

CREATE SEQUENCE holdfast.gate_numbers;

CREATE TABLE holdfast.gates (
    plan_id     text COLLATE "C" PRIMARY KEY,
    inside      bigint NOT NULL DEFAULT 0,
    waiting     bigint NOT NULL DEFAULT 0,
    per_key     bigint NOT NULL DEFAULT 4611686018427387904,   -- as it was last used; 2^62: no limit
    last_tenant text COLLATE "C" NOT NULL DEFAULT '',          -- of whom a run was let in last
    last_start  bigint NOT NULL DEFAULT 0                      -- number of the last row in gate_starts
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE holdfast.gate_starts (
    plan_id   text COLLATE "C" NOT NULL,
    number    bigint NOT NULL,
    starts_at bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE holdfast.gate_runs (
    number    bigint PRIMARY KEY,                              -- in order of coming
    plan_id   text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    key       text COLLATE "C" NOT NULL,
    run_id    text COLLATE "C" NOT NULL,
    place     bigint NOT NULL,                                 -- the least is first in its line
    is_inside boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX gate_runs_waiting ON holdfast.gate_runs (plan_id, tenant, key, place, number) WHERE NOT is_inside;

CREATE TABLE holdfast.gate_exits (
    plan_id text COLLATE "C" NOT NULL,
    number  bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- One row for each tenant and key of which runs wait or are inside: how many are, and who is first in line.
CREATE TABLE holdfast.gate_lines (
    plan_id text COLLATE "C" NOT NULL,
    tenant  text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    inside  bigint NOT NULL,
    per_key bigint NOT NULL,                                   -- that of its gate
    place   bigint,
    number  bigint,
    PRIMARY KEY (plan_id, tenant, key)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX gate_lines_open ON holdfast.gate_lines (plan_id, tenant, place, number)
    WHERE place IS NOT NULL AND inside < per_key;
