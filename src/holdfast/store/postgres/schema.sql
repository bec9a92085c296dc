-- format: 7
-- oldest reader: 7
-- The schema of a store. `holdfast.` is replaced by the requested schema. Instants are microseconds since 1970; JSON is
-- stored as text. Inside the schema a run is identified by run_no. Text is compared byte by byte, as everywhere else.
--
-- A transaction that changes any part of a run holds the lock of its row in `runs`. These are acquired in order of
-- run ids; all other tables are written under them. There are two exceptions without a run's lock: `acquire_jobs` skips
-- jobs that are locked, and a node writes its own lease.

CREATE SEQUENCE holdfast.run_numbers;

-- No index contains a column that a turn changes, so that a turn writes a new version of the row and nothing else; the
-- page has room for it.
CREATE TABLE holdfast.runs (
    run_no           bigint PRIMARY KEY,                  -- in order of creation
    run_id           text COLLATE "C" NOT NULL,
    tenant           text COLLATE "C" NOT NULL,
    project          text COLLATE "C" NOT NULL,
    environment      text COLLATE "C" NOT NULL,
    plan_id          text COLLATE "C" NOT NULL,
    plan_version     text COLLATE "C" NOT NULL,
    run_request_id   text COLLATE "C" NOT NULL,
    request_key      bytea NOT NULL,                      -- SHA256: a request creates one run (QUE-1)
    input_sha256     bytea NOT NULL,
    parent_run_id    text COLLATE "C",
    reference_key    text COLLATE "C",
    tags             text NOT NULL,                       -- JSON array
    status           text COLLATE "C" NOT NULL,
    version          bigint NOT NULL,                     -- run_seq of the last event
    snapshot         text,                                -- JSON RuntimeSnapshot: a cache of the fold
    created_at       bigint NOT NULL,
    updated_at       bigint NOT NULL,
    finished_at      bigint,
    inbox_seq        bigint NOT NULL DEFAULT 0,           -- number of the last signal accepted
    last_accepted_at bigint NOT NULL DEFAULT 0,
    ready_at         bigint,                              -- when a turn is due; NULL: nothing is in sight
    lease_owner      text COLLATE "C",
    lease_epoch      bigint NOT NULL DEFAULT 0,
    queued_at        bigint,                              -- since when it is queued for admission; NULL: it is not
    gate_no          bigint,                              -- its number in gate_runs; NULL: it was created without a request
    losses           bigint NOT NULL DEFAULT 0            -- nodes that were lost while they owned it, since its last turn
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX runs_run_id ON holdfast.runs (run_id);
CREATE UNIQUE INDEX runs_request_key ON holdfast.runs (request_key);
CREATE INDEX runs_finished ON holdfast.runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_parent ON holdfast.runs (parent_run_id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_reference ON holdfast.runs (reference_key) WHERE reference_key IS NOT NULL;

-- The ready set: the runs that are ready, will be ready, or have an owner. `claim` walks through this instead of the
-- runs. While a long transaction prevents the removal of dead rows, they accumulate at positions (`place`) where work
-- was ready before. A claim starts at the oldest position that can be live, so rows must never be inserted before that:
--   lane 0: ready in order; the place is ready_at, which is at most a moment earlier than the insertion of the row.
--   lane 1: ready for longer than that when it was inserted; the place is the instant of its insertion.
--   lane 2: not ready, but owned; the place is the instant of its insertion.
CREATE TABLE holdfast.agenda (
    run_no       bigint PRIMARY KEY,
    owner        text COLLATE "C" NOT NULL,               -- '': no node
    lane         smallint NOT NULL,
    place        bigint NOT NULL,
    ready_at     bigint,
    plan_id      text COLLATE "C" NOT NULL,
    plan_version text COLLATE "C" NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.5);
-- Without run_no: the planner, if it assumes an empty agenda, could otherwise search this index for a run row by row.
CREATE INDEX agenda_places ON holdfast.agenda (owner, lane, place);

CREATE TABLE holdfast.events (
    run_no              bigint NOT NULL,
    run_seq             bigint NOT NULL,
    event_id            text NOT NULL,
    event_type          text NOT NULL,
    step_id             text,
    engine_attempt_id   bigint,
    logical_attempt_id  bigint,
    data                text NOT NULL,                    -- JSON
    idempotency_key     bytea NOT NULL,                   -- SHA256 (EVT-4)
    emitted_at          bigint NOT NULL,
    persisted_at        bigint NOT NULL,
    adapter_version     text NOT NULL,
    engine_run_ref      text NOT NULL,                    -- JSON
    caused_by_signal_id text,
    parent_event_id     text,
    schema_version      bigint NOT NULL,
    PRIMARY KEY (run_no, run_seq),
    UNIQUE (run_no, idempotency_key)
) PARTITION BY HASH (run_no);
DO $do$
BEGIN
    FOR part IN 0..7 LOOP
        EXECUTE format('CREATE TABLE holdfast.events_%s PARTITION OF holdfast.events '
                       'FOR VALUES WITH (MODULUS 8, REMAINDER %s)', part, part);
    END LOOP;
END
$do$;

CREATE TABLE holdfast.messages (
    run_no    bigint NOT NULL,
    signal_id text COLLATE "C" NOT NULL,
    due_at    bigint NOT NULL,
    message   text NOT NULL,                              -- JSON Message
    PRIMARY KEY (run_no, signal_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX messages_due ON holdfast.messages (run_no, due_at);

CREATE TABLE holdfast.signals (
    run_no       bigint NOT NULL,
    inbox_seq    bigint NOT NULL,
    name         text COLLATE "C" NOT NULL,
    signal_id    text COLLATE "C" NOT NULL,
    step_id      text COLLATE "C",
    accepted_at  bigint NOT NULL,                         -- strictly grows with inbox_seq
    received_at  bigint NOT NULL,                         -- what the clock said; the rate limit counts by it
    consumed_seq bigint,                                  -- run_seq of the event that consumed it
    payload      text NOT NULL,                           -- JSON
    by_caller    text,                                    -- JSON CallerRef: who sent it through a service
    PRIMARY KEY (run_no, inbox_seq)
);
-- By name: only those signals of a large mailbox are read that open waits can take.
CREATE INDEX signals_unconsumed ON holdfast.signals (run_no, name, inbox_seq) WHERE consumed_seq IS NULL;
CREATE INDEX signals_by_id ON holdfast.signals (run_no, name, signal_id, accepted_at);

-- The answer to a repeated signal is built from these columns and the run's id.
CREATE TABLE holdfast.acceptance_records (
    run_no         bigint NOT NULL,
    name           text COLLATE "C" NOT NULL,
    signal_id      text COLLATE "C" NOT NULL,
    inbox_seq      bigint NOT NULL,
    payload_sha256 bytea NOT NULL,
    accepted_at    bigint NOT NULL,
    expires_at     bigint NOT NULL,
    version        bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (run_no, name, signal_id)
);
CREATE INDEX acceptance_records_expiry ON holdfast.acceptance_records (expires_at);

CREATE TABLE holdfast.waits (
    run_no  bigint NOT NULL,
    step_id text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    token   text NOT NULL,
    since   bigint NOT NULL,
    until   bigint,
    PRIMARY KEY (run_no, step_id)
);
CREATE INDEX waits_by_name ON holdfast.waits (name);      -- without run_no, as agenda_places

CREATE TABLE holdfast.tasks (
    task_id  text COLLATE "C" PRIMARY KEY,
    run_no   bigint NOT NULL,
    step_id  text COLLATE "C" NOT NULL,
    status   text COLLATE "C" NOT NULL,
    assignee text COLLATE "C",
    roles    text[] NOT NULL,
    due_at   bigint,
    task     text NOT NULL                                -- JSON Task
);
CREATE UNIQUE INDEX tasks_open ON holdfast.tasks (run_no, step_id) WHERE status = 'OPEN';
CREATE INDEX tasks_by_run ON holdfast.tasks (run_no);
CREATE INDEX tasks_by_assignee ON holdfast.tasks (assignee, status, task_id) WHERE assignee IS NOT NULL;
CREATE INDEX tasks_by_due ON holdfast.tasks (status, due_at);
CREATE INDEX tasks_by_role ON holdfast.tasks USING gin (roles);
CREATE INDEX tasks_for_anybody ON holdfast.tasks (status, task_id) WHERE roles = '{}' AND assignee IS NULL;

CREATE TABLE holdfast.activity_records (
    run_no          bigint NOT NULL,
    activity_name   text COLLATE "C" NOT NULL,
    step_id         text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    is_completed    boolean NOT NULL,
    record          text NOT NULL,                        -- JSON ActivityRecord
    PRIMARY KEY (run_no, activity_name, step_id, idempotency_key)
);
CREATE INDEX activity_records_open ON holdfast.activity_records (run_no) WHERE NOT is_completed;

-- Activities in queues, and the progress that activities have reported.
CREATE TABLE holdfast.jobs (
    run_no       bigint NOT NULL,
    step_id      text COLLATE "C" NOT NULL,
    queue        text COLLATE "C" NOT NULL,               -- '': carried out by the run's owner; there are only details
    activity     text COLLATE "C" NOT NULL,
    visible_at   bigint,                                  -- when it may be taken; NULL: never
    taken_by     text COLLATE "C",                        -- node of the last take
    next_attempt bigint NOT NULL,                         -- engine_attempt_id of the next take
    details      text,                                    -- JSON
    job          text,                                    -- JSON Job
    PRIMARY KEY (run_no, step_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX jobs_visible ON holdfast.jobs (queue, visible_at, run_no, step_id) WHERE visible_at IS NOT NULL;

-- Messages that could not be handled. Text written by users may contain a NUL, which the type text does not allow.
CREATE TABLE holdfast.dead_letters (
    letter_id  text COLLATE "C" PRIMARY KEY,
    run_no     bigint NOT NULL,
    reason     text COLLATE "C" NOT NULL,
    detail     bytea NOT NULL,
    node       text NOT NULL,
    died_at    bigint NOT NULL,
    settled    text,                                      -- NULL: it is open
    settled_by bytea NOT NULL DEFAULT '',
    settled_at bigint,
    envelope   bytea NOT NULL                             -- JSON Message, or the bytes that were found instead
);
CREATE INDEX dead_letters_open ON holdfast.dead_letters (died_at, letter_id) WHERE settled IS NULL;
CREATE INDEX dead_letters_by_run ON holdfast.dead_letters (run_no, died_at, letter_id);

CREATE TABLE holdfast.nodes (
    node        text COLLATE "C" PRIMARY KEY,
    lease_until bigint NOT NULL,
    -- What the node can run; NULL: it has published nothing, and may have everything. A definition is one text: a
    -- plan's id, a line break, and its version; no name contains a line break.
    plans       text[]
) WITH (fillfactor = 50);

-- Access tokens of a service: their data, not the tokens themselves.
CREATE TABLE holdfast.access_tokens (
    token_id     text COLLATE "C" PRIMARY KEY,
    tenant       text COLLATE "C",                        -- NULL: for all tenants
    session_of   text COLLATE "C",                        -- NULL: no session
    expires_at   bigint,
    revoked_at   bigint,
    revoked_by   bytea NOT NULL DEFAULT '',
    last_used_at bigint,
    token        text NOT NULL                            -- JSON AccessToken, as it was made
);
CREATE INDEX access_tokens_sessions ON holdfast.access_tokens (expires_at) WHERE session_of IS NOT NULL;

-- The runs whose histories each transaction has extended: one row for all turns that were committed together.
-- Transactions become visible in a different order than they are numbered, so a reader keeps a snapshot: everything
-- before a number, except transactions that were in progress.
CREATE TABLE holdfast.growth (
    xid        bigint NOT NULL,
    runs       bigint[] NOT NULL,                         -- run_no of each new event
    with_tasks bigint[]                                   -- of those that are about tasks
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX growth_xid ON holdfast.growth (xid);

-- What is kept of these records, in one row. A record is deleted half a minute after the end of its transaction.
CREATE TABLE holdfast.growth_kept (
    lost_before  bigint NOT NULL,                         -- of transactions before this one rows may be gone
    ended_before bigint NOT NULL,                         -- those before this one had ended then
    noted_at     bigint NOT NULL
);
INSERT INTO holdfast.growth_kept VALUES (0, 0, 0);

-- Admission queues of workflows with limits (`core/admission.py`): the queued runs, and the admitted ones.
--
-- Everything in one queue is written under the lock of its row in `gates`. These locks are acquired in the order of the
-- plans' names, and before the lock of any run. Starting and leaving acquire none: a run that finishes puts its number
-- into `gate_exits`, and one that starts under a rate into `gate_started`; the next transaction that holds the lock of
-- the queue counts them.

CREATE SEQUENCE holdfast.gate_numbers;

CREATE TABLE holdfast.gates (
    plan_id     text COLLATE "C" PRIMARY KEY,
    inside      bigint NOT NULL DEFAULT 0,
    waiting     bigint NOT NULL DEFAULT 0,
    per_key     bigint NOT NULL DEFAULT 4611686018427387904,   -- as it was last used; 2^62: no limit
    last_tenant text COLLATE "C" NOT NULL DEFAULT '',          -- of the run that was admitted last
    last_start  bigint NOT NULL DEFAULT 0,                     -- number of the last row in gate_starts
    starting    bigint NOT NULL DEFAULT 0                      -- how many were admitted under a rate and have yet to start
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE holdfast.gate_starts (
    plan_id   text COLLATE "C" NOT NULL,
    number    bigint NOT NULL,
    starts_at bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE holdfast.gate_runs (
    number    bigint PRIMARY KEY,                              -- in order of creation
    plan_id   text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    key       text COLLATE "C" NOT NULL,
    run_id    text COLLATE "C" NOT NULL,
    place     bigint NOT NULL,                                 -- its rank: the lowest is first in its line
    is_inside boolean NOT NULL DEFAULT false,
    is_starting boolean NOT NULL DEFAULT false                 -- admitted under a rate, and has yet to start
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX gate_runs_waiting ON holdfast.gate_runs (plan_id, tenant, key, place, number) WHERE NOT is_inside;

CREATE TABLE holdfast.gate_exits (
    plan_id text COLLATE "C" NOT NULL,
    number  bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- One row for each tenant and key with runs: how many of them are admitted, and which queued one is first.
CREATE TABLE holdfast.gate_lines (
    plan_id text COLLATE "C" NOT NULL,
    tenant  text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    inside  bigint NOT NULL,
    per_key bigint NOT NULL,                                   -- that of `gates`
    place   bigint,
    number  bigint,
    PRIMARY KEY (plan_id, tenant, key)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX gate_lines_open ON holdfast.gate_lines (plan_id, tenant, place, number)
    WHERE place IS NOT NULL AND inside < per_key;

CREATE TABLE holdfast.gate_started (
    plan_id    text COLLATE "C" NOT NULL,
    number     bigint NOT NULL,
    started_at bigint NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- The audit log: what operators have done.
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

CREATE TABLE holdfast.definitions (
    plan_id      text COLLATE "C" NOT NULL,
    plan_version text COLLATE "C" NOT NULL,
    definition   text NOT NULL,                           -- JSON PublishedDefinition: what the version declares
    PRIMARY KEY (plan_id, plan_version)
);
