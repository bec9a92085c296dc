-- What a verb does, as one function each: one round trip and one transaction for a whole batch. Every statement sees
-- what was committed before it began, so what is read after the locks are held is true until the end.
-- `migrate` applies this file whenever a store has other functions than these: change a function here, in its place.
-- Nodes of two releases call the functions during a rolling upgrade, so one whose arguments or answer change takes the
-- next number in its name, and the former stays in databases that have it until no release calls it any more.
-- The plans are the same whatever the tables hold and whenever they are made: for each item, look into an index. The
-- settings of each function leave the planner no other way, and tables that are mostly small are looked into item by
-- item, never joined: a planner that takes them for empty would walk through dead rows.
-- An inner join says `= ANY (ARRAY[x])`: a plain equality would offer the order of an index for a merge, and a planner
-- that knows of a single row walks through that index for every item, until the table is analyzed again.

-- When a lease ends: at once, if it was given by a clock so far ahead that it must be wrong.
CREATE OR REPLACE FUNCTION holdfast.lease_end_1(p_until bigint, p_now bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_until <= p_now + 7200000000 THEN p_until ELSE p_now END
$$;

CREATE OR REPLACE FUNCTION holdfast.time_1(p_now bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- The same as inbox_uuid in core/keys.py.
CREATE OR REPLACE FUNCTION holdfast.inbox_uuid_1(p_run_id text, p_seq bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT substr(key, 1, 8) || '-' || substr(key, 9, 4) || '-8' || substr(key, 14, 3) || '-'
        || translate(substr(key, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab') || substr(key, 18, 3) || '-'
        || substr(key, 21, 12)
    FROM encode(sha256(convert_to(p_run_id || '|inbox|' || p_seq, 'UTF8')), 'hex') AS key
$$;

-- What stands behind the version by which a run is claimed whose snapshot says that it needs a level of the format: only
-- nodes that understand the level ask for it. Nodes of older releases call these functions too, and do not.
CREATE OR REPLACE FUNCTION holdfast.level_1(p_snapshot text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN strpos(p_snapshot, '"needs":') > 0
        THEN coalesce(E'\n' || (p_snapshot::jsonb ->> 'needs'), '') ELSE '' END
$$;

-- Enter runs into the agenda as they now are, or take them off it. The locks of the runs are held.
CREATE OR REPLACE FUNCTION holdfast.enter_1(p_runs bigint[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM holdfast.agenda
    WHERE run_no = ANY (ARRAY(
        SELECT r.run_no FROM holdfast.runs r
        WHERE r.run_no = ANY (p_runs) AND r.lease_owner IS NULL AND r.ready_at IS NULL
    ));
    INSERT INTO holdfast.agenda (run_no, owner, lane, place, ready_at, plan_id, plan_version)
    SELECT run_no, coalesce(lease_owner, ''),
        CASE WHEN ready_at IS NULL THEN 2 WHEN ready_at < p_now - 1000000 THEN 1 ELSE 0 END,
        CASE WHEN ready_at < p_now - 1000000 THEN p_now ELSE coalesce(ready_at, p_now) END,
        ready_at, CASE WHEN starts_with(plan_id, 'plan:') THEN 'plan:' ELSE plan_id END,
        CASE WHEN starts_with(plan_id, 'plan:') THEN '*' ELSE plan_version END  -- all plans are claimed alike
            || holdfast.level_1(snapshot)
    FROM holdfast.runs
    WHERE run_no = ANY (p_runs) AND (lease_owner IS NOT NULL OR ready_at IS NOT NULL)
    ON CONFLICT (run_no) DO UPDATE
    SET owner = excluded.owner, lane = excluded.lane, place = excluded.place, ready_at = excluded.ready_at,
        plan_version = excluded.plan_version;
END
$$;

-- What only some turns have. `p_numbers` holds the run of each turn, 0 if the turn lost.
CREATE OR REPLACE FUNCTION holdfast.commit_more_1(p_more jsonb, p_numbers bigint[], p_now bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_more ? 'received' THEN
        -- By the rows' places: joined by their keys, they could be found by walking through all that are unconsumed.
        -- Each in the order of the primary key, so that no other index will do.
        UPDATE holdfast.signals s SET consumed_seq = x.run_seq
        FROM (
            SELECT y.run_seq, z.ctid AS place
            FROM jsonb_to_recordset(p_more -> 'received') AS y (turn int, inbox_seq bigint, run_seq bigint)
            CROSS JOIN LATERAL (
                SELECT o.ctid, o.inbox_seq, o.consumed_seq FROM holdfast.signals o
                WHERE o.run_no = p_numbers[y.turn] AND o.inbox_seq >= y.inbox_seq
                ORDER BY o.run_no, o.inbox_seq LIMIT 1
            ) z
            WHERE z.inbox_seq = y.inbox_seq AND z.consumed_seq IS NULL
        ) x
        WHERE s.ctid = x.place;
    END IF;
    IF p_more ? 'closed' THEN
        DELETE FROM holdfast.waits WHERE ctid = ANY (ARRAY(
            SELECT (SELECT w.ctid FROM holdfast.waits w WHERE w.run_no = p_numbers[x.turn] AND w.step_id = x.step_id)
            FROM jsonb_to_recordset(p_more -> 'closed') AS x (turn int, step_id text)));
    END IF;
    IF p_more ? 'opened' THEN
        INSERT INTO holdfast.waits (run_no, step_id, name, token, since, until)
        SELECT p_numbers[x.turn], x.step_id, x.name, x.token, x.since, x.until
        FROM jsonb_to_recordset(p_more -> 'opened')
            AS x (turn int, step_id text, name text, token text, since bigint, until bigint)
        WHERE p_numbers[x.turn] > 0
        ON CONFLICT (run_no, step_id) DO UPDATE
        SET name = excluded.name, token = excluded.token, since = excluded.since, until = excluded.until;
    END IF;
    IF p_more ? 'plans' THEN
        INSERT INTO holdfast.plan_uses (run_no, tenant, sha256)
        SELECT p_numbers[x.turn], x.tenant, decode(x.sha256, 'hex')
        FROM jsonb_to_recordset(p_more -> 'plans') AS x (turn int, tenant text, sha256 text)
        WHERE p_numbers[x.turn] > 0;
    END IF;
    IF p_more ? 'attributes' THEN  -- all that a run has, in place of what it had; a row without a name is none
        DELETE FROM holdfast.run_attributes WHERE run_no = ANY (ARRAY(
            SELECT p_numbers[x.turn] FROM jsonb_to_recordset(p_more -> 'attributes') AS x (turn int)));
        INSERT INTO holdfast.run_attributes (run_no, name, kind, number, word, tenant)
        SELECT p_numbers[x.turn], x.name, x.kind, x.number, x.word,
            (SELECT r.tenant FROM holdfast.runs r WHERE r.run_no = p_numbers[x.turn])
        FROM jsonb_to_recordset(p_more -> 'attributes')
            AS x (turn int, name text, kind text, number double precision, word text)
        WHERE p_numbers[x.turn] > 0 AND x.name IS NOT NULL;
    END IF;
    IF p_more ? 'tasks' THEN  -- closed ones first: a step has at most one open task
        INSERT INTO holdfast.tasks AS t (task_id, run_no, step_id, status, assignee, roles, due_at, task)
        SELECT x.task_id, p_numbers[x.turn], x.step_id, x.status, x.assignee,
            ARRAY(SELECT jsonb_array_elements_text(x.roles)), x.due_at, x.task
        FROM jsonb_to_recordset(p_more -> 'tasks') AS x (turn int, task_id text, step_id text, status text,
            assignee text, roles jsonb, due_at bigint, task text)
        WHERE p_numbers[x.turn] > 0
        ORDER BY x.status = 'OPEN'
        ON CONFLICT (task_id) DO UPDATE
        SET step_id = excluded.step_id, status = excluded.status, assignee = excluded.assignee,
            roles = excluded.roles, due_at = excluded.due_at, task = excluded.task
        WHERE t.run_no = excluded.run_no;
    END IF;
    IF p_more ? 'records' THEN
        INSERT INTO holdfast.activity_records
            (run_no, activity_name, step_id, idempotency_key, is_completed, record)
        SELECT p_numbers[x.turn], x.activity_name, x.step_id, x.idempotency_key, x.is_completed, x.record
        FROM jsonb_to_recordset(p_more -> 'records') AS x (turn int, activity_name text, step_id text,
            idempotency_key text, is_completed boolean, record text)
        WHERE p_numbers[x.turn] > 0
        ON CONFLICT (run_no, activity_name, step_id, idempotency_key) DO UPDATE
        SET is_completed = excluded.is_completed, record = excluded.record;
    END IF;
    IF p_more ? 'jobs_closed' THEN
        DELETE FROM holdfast.jobs WHERE ctid = ANY (ARRAY(
            SELECT (SELECT j.ctid FROM holdfast.jobs j WHERE j.run_no = p_numbers[x.turn] AND j.step_id = x.step_id)
            FROM jsonb_to_recordset(p_more -> 'jobs_closed') AS x (turn int, step_id text)));
    END IF;
    IF p_more ? 'jobs' THEN
        INSERT INTO holdfast.jobs AS j
            (run_no, step_id, queue, activity, visible_at, next_attempt, details, job)
        SELECT p_numbers[x.turn], x.step_id, x.queue, x.activity, coalesce(x.due_at, p_now), x.next_attempt,
            x.details, x.job
        FROM jsonb_to_recordset(p_more -> 'jobs') AS x (turn int, step_id text, queue text, activity text,
            due_at bigint, next_attempt bigint, details text, job text)
        WHERE p_numbers[x.turn] > 0
        ON CONFLICT (run_no, step_id) DO UPDATE
        SET queue = excluded.queue, activity = excluded.activity, visible_at = excluded.visible_at, taken_by = NULL,
            next_attempt = excluded.next_attempt, details = coalesce(j.details, excluded.details),
            job = excluded.job;
    END IF;
    IF p_more ? 'dead' THEN
        INSERT INTO holdfast.dead_letters
            (letter_id, run_no, reason, detail, node, died_at, settled, settled_by, settled_at, envelope)
        SELECT x.letter_id, p_numbers[x.turn], x.reason, decode(x.detail, 'hex'), x.node, x.died_at, x.settled,
            decode(x.settled_by, 'hex'), x.settled_at, decode(x.envelope, 'hex')
        FROM jsonb_to_recordset(p_more -> 'dead') AS x (turn int, letter_id text, reason text, detail text,
            node text, died_at bigint, settled text, settled_by text, settled_at bigint, envelope text)
        WHERE p_numbers[x.turn] > 0
        ON CONFLICT (letter_id) DO UPDATE
        SET run_no = excluded.run_no, reason = excluded.reason, detail = excluded.detail, node = excluded.node,
            died_at = excluded.died_at, settled = excluded.settled, settled_by = excluded.settled_by,
            settled_at = excluded.settled_at, envelope = excluded.envelope;
    END IF;
END
$$;

-- Whether the outcome of an activity was accepted after the signals that a turn has seen. (The name is written in two
-- parts, because in one it would be taken for the schema.)
CREATE OR REPLACE FUNCTION holdfast.has_unseen_outcome_1(p_run bigint, p_seen bigint) RETURNS boolean
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM 1 FROM holdfast.signals s
    WHERE s.run_no = p_run AND s.inbox_seq > p_seen AND s.consumed_seq IS NULL AND s.name = 'holdfast' || '.outcome'
    LIMIT 1;
    RETURN FOUND;
END
$$;

-- Turns of different runs. Verdicts: 0 committed, 1 no such run, 2 version, 3 epoch, 4 finished, 5 cannot be stored,
-- 6 the outcome of an activity was accepted that the turn has not seen.
-- A turn that would append an event again, or open a second task, makes the whole call fail: the caller finds out which.
CREATE OR REPLACE FUNCTION holdfast.commit_1(
    p_now bigint,
    p_run_ids text[], p_versions bigint[], p_epochs bigint[], p_counts bigint[], p_statuses text[],
    p_snapshots text[], p_ends boolean[], p_seen bigint[], p_releases boolean[], p_unfit boolean[],
    e_turn int[], e_seq bigint[], e_id text[], e_type text[], e_step text[], e_engine bigint[], e_logical bigint[],
    e_data text[], e_key bytea[], e_emitted bigint[], e_adapter text[], e_ref text[], e_cause text[],
    e_parent text[], e_schema bigint[],
    c_turn int[], c_signal text[],
    m_turn int[], m_signal text[], m_due bigint[], m_message text[],
    p_more jsonb,
    OUT o_now bigint, OUT o_verdicts int[], OUT o_versions bigint[], OUT o_epochs bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_numbers bigint[];
    v_owners text[];
    v_readies bigint[];
    v_ended bigint[];
    v_changed bigint[];
BEGIN
    PERFORM 1 FROM holdfast.runs WHERE run_id = ANY (p_run_ids) ORDER BY run_id FOR UPDATE;
    o_now := holdfast.time_1(p_now);
    SELECT array_agg(j.verdict ORDER BY j.ord), array_agg(coalesce(j.version, 0) ORDER BY j.ord),
        array_agg(coalesce(j.lease_epoch, 0) ORDER BY j.ord),
        array_agg(CASE WHEN j.verdict = 0 THEN j.run_no ELSE 0 END ORDER BY j.ord),
        array_agg(j.lease_owner ORDER BY j.ord), array_agg(j.ready_at ORDER BY j.ord),
        array_agg(j.run_no) FILTER (WHERE j.verdict = 0 AND j.is_end)
    INTO o_verdicts, o_versions, o_epochs, v_numbers, v_owners, v_readies, v_ended
    FROM (
        SELECT t.ord, t.is_end, r.run_no, r.version, r.lease_epoch, r.lease_owner, r.ready_at,
            CASE
                WHEN r.run_no IS NULL THEN 1
                WHEN r.version <> t.version THEN 2
                WHEN r.lease_epoch <> t.epoch THEN 3
                WHEN r.finished_at IS NOT NULL AND (t.events > 0 OR NOT t.is_end) THEN 4
                WHEN r.inbox_seq > t.seen AND holdfast.has_unseen_outcome_1(r.run_no, t.seen) THEN 6
                WHEN t.is_unfit THEN 5
                ELSE 0
            END AS verdict
        FROM unnest(p_run_ids, p_versions, p_epochs, p_counts, p_ends, p_seen, p_unfit)
            WITH ORDINALITY AS t (run_id, version, epoch, events, is_end, seen, is_unfit, ord)
        LEFT JOIN holdfast.runs r ON r.run_id = t.run_id
    ) j;

    INSERT INTO holdfast.events (run_no, run_seq, event_id, event_type, step_id, engine_attempt_id,
        logical_attempt_id, data, idempotency_key, emitted_at, persisted_at, adapter_version, engine_run_ref,
        caused_by_signal_id, parent_event_id, schema_version)
    SELECT v_numbers[e.turn], e.seq, e.id, e.type, e.step, e.engine, e.logical, e.data, e.key, e.emitted, o_now,
        e.adapter, e.ref, e.cause, e.parent, e.schema
    FROM unnest(e_turn, e_seq, e_id, e_type, e_step, e_engine, e_logical, e_data, e_key, e_emitted, e_adapter, e_ref,
        e_cause, e_parent, e_schema)
        AS e (turn, seq, id, type, step, engine, logical, data, key, emitted, adapter, ref, cause, parent, schema)
    WHERE v_numbers[e.turn] > 0;

    IF cardinality(c_turn) > 0 THEN
        DELETE FROM holdfast.messages WHERE ctid = ANY (ARRAY(
            SELECT (SELECT m.ctid FROM holdfast.messages m WHERE (m.run_no, m.signal_id) = (v_numbers[c.turn], c.signal))
            FROM unnest(c_turn, c_signal) AS c (turn, signal)));
    END IF;
    IF cardinality(m_turn) > 0 THEN
        INSERT INTO holdfast.messages (run_no, signal_id, due_at, message)
        SELECT v_numbers[m.turn], m.signal_id, coalesce(m.due_at, o_now), m.message
        FROM unnest(m_turn, m_signal, m_due, m_message) AS m (turn, signal_id, due_at, message)
        WHERE v_numbers[m.turn] > 0
        ON CONFLICT (run_no, signal_id) DO UPDATE SET due_at = excluded.due_at, message = excluded.message;
    END IF;
    IF p_more IS NOT NULL THEN
        PERFORM holdfast.commit_more_1(p_more, v_numbers, o_now);
    END IF;
    IF v_ended IS NOT NULL THEN
        DELETE FROM holdfast.messages WHERE run_no = ANY (v_ended);
        DELETE FROM holdfast.waits WHERE run_no = ANY (v_ended);
        DELETE FROM holdfast.jobs WHERE run_no = ANY (v_ended);
    END IF;

    WITH written AS (
        UPDATE holdfast.runs r
        SET status = t.status, version = t.version + t.events, snapshot = t.snapshot, updated_at = o_now, losses = 0,
            finished_at = CASE WHEN t.is_end THEN coalesce(r.finished_at, o_now) END,
            lease_owner = CASE WHEN NOT t.is_end AND NOT t.is_release THEN r.lease_owner END,
            ready_at = CASE WHEN NOT t.is_end THEN least(
                CASE WHEN r.inbox_seq > t.seen THEN o_now END,
                (SELECT min(m.due_at) FROM holdfast.messages m WHERE m.run_no = r.run_no)
            ) END
        FROM (
            SELECT * FROM unnest(v_numbers, p_versions, p_counts, p_statuses, p_snapshots, p_ends, p_seen, p_releases,
                v_owners, v_readies)
            LIMIT cardinality(v_numbers)  -- of an unknown number the server expects few, and looks each of them up
        ) AS t (run_no, version, events, status, snapshot, is_end, seen, is_release, owner, ready_at)
        WHERE r.run_no = ANY (ARRAY[t.run_no])
        RETURNING r.run_no, (r.lease_owner, r.ready_at) IS DISTINCT FROM (t.owner, t.ready_at)
            OR strpos(t.snapshot, '"needs":') > 0 AS is_changed
    )
    SELECT array_agg(run_no) INTO v_changed FROM written WHERE is_changed;
    IF p_more ? 'losses' THEN
        UPDATE holdfast.runs r SET losses = x.losses
        FROM jsonb_to_recordset(p_more -> 'losses') AS x (turn int, losses bigint)
        WHERE r.run_no = ANY (ARRAY[v_numbers[x.turn]]);
    END IF;
    IF v_changed IS NOT NULL THEN
        PERFORM holdfast.enter_1(v_changed, o_now);
    END IF;
END
$$;

-- Codes: C created, K the request is known (its run and the digest of its input are given), T the run id is taken;
-- a single row with X if the owner's lease is not current.
CREATE OR REPLACE FUNCTION holdfast.create_1(
    p_now bigint, p_owner text,
    r_id text[], r_tenant text[], r_project text[], r_environment text[], r_plan text[], r_plan_version text[],
    r_request text[], r_key bytea[], r_input bytea[], r_parent text[], r_reference text[], r_tags text[],
    r_status text[], r_events bigint[], r_snapshot text[], r_due bigint[], r_is_due boolean[],
    e_run int[], e_seq bigint[], e_id text[], e_type text[], e_step text[], e_engine bigint[], e_logical bigint[],
    e_data text[], e_key bytea[], e_emitted bigint[], e_adapter text[], e_ref text[], e_cause text[],
    e_parent text[], e_schema bigint[],
    m_run int[], m_signal text[], m_due bigint[], m_message text[],
    p_more jsonb
) RETURNS TABLE (o_now bigint, o_ord bigint, o_code text, o_run_id text, o_input bytea) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint;
    v_numbers bigint[];
BEGIN
    v_now := holdfast.time_1(p_now);
    -- The lock keeps the node from being forgotten before its runs can be seen.
    PERFORM 1 FROM holdfast.nodes WHERE node = p_owner AND holdfast.lease_end_1(lease_until, v_now) > v_now FOR KEY SHARE;
    IF p_owner IS NOT NULL AND NOT FOUND THEN
        RETURN QUERY SELECT v_now, 0::bigint, 'X', NULL::text, NULL::bytea;
        RETURN;
    END IF;
    v_numbers := ARRAY(SELECT nextval('holdfast.run_numbers') FROM generate_series(1, cardinality(r_id)));
    -- In the order of keys, so that two who ask for the same runs wait for each other in one direction only.
    INSERT INTO holdfast.runs (run_no, run_id, tenant, project, environment, plan_id, plan_version, run_request_id,
        request_key, input_sha256, parent_run_id, reference_key, tags, status, version, snapshot, created_at,
        updated_at, ready_at, lease_owner, lease_epoch)
    SELECT t.run_no, t.id, t.tenant, t.project, t.environment, t.plan, t.plan_version, t.request, t.key, t.input,
        t.parent, t.reference, t.tags, t.status, t.events, t.snapshot, v_now, v_now,
        least(t.due, CASE WHEN t.is_due THEN v_now END), p_owner, CASE WHEN p_owner IS NULL THEN 0 ELSE 1 END
    FROM unnest(v_numbers, r_id, r_tenant, r_project, r_environment, r_plan, r_plan_version, r_request, r_key,
        r_input, r_parent, r_reference, r_tags, r_status, r_events, r_snapshot, r_due, r_is_due)
        AS t (run_no, id, tenant, project, environment, plan, plan_version, request, key, input, parent, reference,
            tags, status, events, snapshot, due, is_due)
    ORDER BY t.key
    ON CONFLICT DO NOTHING;
    v_numbers := ARRAY(
        SELECT coalesce(r.run_no, 0)
        FROM unnest(v_numbers) WITH ORDINALITY AS t (run_no, ord) LEFT JOIN holdfast.runs r ON r.run_no = t.run_no
        ORDER BY t.ord
    );

    INSERT INTO holdfast.events (run_no, run_seq, event_id, event_type, step_id, engine_attempt_id,
        logical_attempt_id, data, idempotency_key, emitted_at, persisted_at, adapter_version, engine_run_ref,
        caused_by_signal_id, parent_event_id, schema_version)
    SELECT v_numbers[e.run], e.seq, e.id, e.type, e.step, e.engine, e.logical, e.data, e.key, e.emitted, v_now,
        e.adapter, e.ref, e.cause, e.parent, e.schema
    FROM unnest(e_run, e_seq, e_id, e_type, e_step, e_engine, e_logical, e_data, e_key, e_emitted, e_adapter, e_ref,
        e_cause, e_parent, e_schema)
        AS e (run, seq, id, type, step, engine, logical, data, key, emitted, adapter, ref, cause, parent, schema)
    WHERE v_numbers[e.run] > 0;
    INSERT INTO holdfast.messages (run_no, signal_id, due_at, message)
    SELECT v_numbers[m.run], m.signal_id, coalesce(m.due_at, v_now), m.message
    FROM unnest(m_run, m_signal, m_due, m_message) AS m (run, signal_id, due_at, message)
    WHERE v_numbers[m.run] > 0;
    IF p_more IS NOT NULL THEN
        PERFORM holdfast.commit_more_1(p_more, v_numbers, v_now);
    END IF;
    INSERT INTO holdfast.agenda (run_no, owner, lane, place, ready_at, plan_id, plan_version)
    SELECT n.run_no, coalesce(p_owner, ''),
        CASE WHEN n.ready_at IS NULL THEN 2 WHEN n.ready_at < v_now - 1000000 THEN 1 ELSE 0 END,
        CASE WHEN n.ready_at < v_now - 1000000 THEN v_now ELSE coalesce(n.ready_at, v_now) END,
        n.ready_at, CASE WHEN starts_with(n.plan, 'plan:') THEN 'plan:' ELSE n.plan END,
        CASE WHEN starts_with(n.plan, 'plan:') THEN '*' ELSE n.plan_version END || holdfast.level_1(n.snapshot)
    FROM (
        SELECT t.run_no, t.plan, t.plan_version, t.snapshot, least(t.due, CASE WHEN t.is_due THEN v_now END) AS ready_at
        FROM unnest(v_numbers, r_plan, r_plan_version, r_snapshot, r_due, r_is_due)
            AS t (run_no, plan, plan_version, snapshot, due, is_due)
    ) n
    WHERE n.run_no > 0 AND (p_owner IS NOT NULL OR n.ready_at IS NOT NULL);

    RETURN QUERY
    SELECT v_now, t.ord, CASE WHEN t.run_no > 0 THEN 'C' WHEN k.run_no IS NOT NULL THEN 'K' ELSE 'T' END,
        coalesce(k.run_id, t.id), k.input_sha256
    FROM unnest(v_numbers, r_id, r_key) WITH ORDINALITY AS t (run_no, id, key, ord)
    LEFT JOIN holdfast.runs k ON t.run_no = 0 AND k.request_key = t.key;
END
$$;

-- The same as came_at_of in core/messages.py.
CREATE OR REPLACE FUNCTION holdfast.came_at_1(p_accepted bigint, p_received bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_accepted > p_received + 1000000 THEN p_received ELSE p_accepted END
$$;

-- Return whether a signal that comes now would be taken, after those ahead of it have taken their waits; the same as
-- finds_wait in store/decisions.py.
CREATE OR REPLACE FUNCTION holdfast.finds_wait_2(p_run bigint, p_name text, p_step text, p_now bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    v_steps text[];
    v_until bigint[];  -- before the first instant of all where the wait is taken
    v_ahead record;
    v_place int;
BEGIN
    SELECT array_agg(w.step_id), array_agg(coalesce(w.until, 9223372036854775807)) INTO v_steps, v_until FROM (
        SELECT step_id, until FROM holdfast.waits WHERE run_no = p_run AND name = p_name
        ORDER BY since,
            CASE WHEN substring(token FROM '[^@]*$') ~ '^[0-9]+$' THEN substring(token FROM '[^@]*$')::numeric ELSE 0 END,
            step_id
    ) w;
    FOR v_ahead IN
        SELECT a.step_id, a.came_at FROM (
            SELECT step_id, holdfast.came_at_1(accepted_at, received_at) AS came_at, inbox_seq FROM holdfast.signals
            WHERE run_no = p_run AND consumed_seq IS NULL AND name = p_name
            UNION ALL SELECT p_step, p_now, 9223372036854775807
        ) a ORDER BY a.inbox_seq
    LOOP
        v_place := NULL;
        FOR i IN 1 .. coalesce(cardinality(v_steps), 0) LOOP
            IF v_until[i] >= v_ahead.came_at AND coalesce(v_ahead.step_id = v_steps[i], true) THEN
                v_place := i;
                v_until[i] := -1;
                EXIT;
            END IF;
        END LOOP;
    END LOOP;
    RETURN v_place IS NOT NULL;
END
$$;

-- Whether a run has a signal of this id. In the order of its index, so that no other index will do: a run may have many.
CREATE OR REPLACE FUNCTION holdfast.has_signal_1(p_run bigint, p_name text, p_signal text, p_after bigint) RETURNS boolean
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM 1 FROM holdfast.signals s
    WHERE s.run_no = p_run AND s.name = p_name AND s.signal_id = p_signal AND s.accepted_at > p_after
    ORDER BY s.run_no, s.name, s.signal_id, s.accepted_at LIMIT 1;
    RETURN FOUND;
END
$$;

-- When the so many-th last signal of a run came. The engine's own do not count. (Their prefix is written in two parts,
-- because in one it would be taken for the schema.)
CREATE OR REPLACE FUNCTION holdfast.counted_1(p_run bigint, p_back bigint) RETURNS bigint LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN (
        SELECT s.received_at FROM holdfast.signals s
        WHERE s.run_no = p_run AND NOT starts_with(s.name, 'holdfast' || '.')
        ORDER BY s.run_no DESC, s.inbox_seq DESC OFFSET p_back LIMIT 1
    );
END
$$;

-- Signals and messages; no two of the same id, and one that requires a wait is the only signal of its run.
-- Codes: A accepted, D duplicate (both with inbox number and time of acceptance), F no such run, P other payload,
-- I indeterminate, T finished (with the status), W not waiting, R over the rate (with the instant that it is counted
-- from), N not looked at: deliver it again after the others.
CREATE OR REPLACE FUNCTION holdfast.deliver_2(
    p_now bigint, p_retention bigint, p_most bigint,
    s_ord bigint[], s_run text[], s_name text[], s_signal text[], s_step text[], s_payload text[], s_digest bytea[],
    s_waiting boolean[], s_uncounted boolean[], s_by text[],
    m_ord bigint[], m_run text[], m_signal text[], m_due bigint[], m_message text[]
) RETURNS TABLE (o_now bigint, o_ord bigint, o_code text, o_status text, o_seq bigint, o_at bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint;
    v_changed bigint[];
BEGIN
    PERFORM 1 FROM holdfast.runs WHERE run_id = ANY (s_run || m_run) ORDER BY run_id FOR UPDATE;
    v_now := holdfast.time_1(p_now);
    IF cardinality(s_ord) > 0 THEN
        RETURN QUERY
        WITH found AS (
            SELECT t.*, r.run_no, r.status, r.finished_at, r.inbox_seq AS base, r.last_accepted_at,
                a.inbox_seq AS known_seq, a.accepted_at AS known_at, a.expires_at, a.payload_sha256
            FROM unnest(s_ord, s_run, s_name, s_signal, s_step, s_payload, s_digest, s_waiting, s_uncounted, s_by)
                AS t (ord, run_id, name, signal_id, step_id, payload, digest, is_waiting, is_uncounted, by_caller)
            LEFT JOIN holdfast.runs r ON r.run_id = t.run_id
            LEFT JOIN LATERAL (SELECT * FROM holdfast.acceptance_records x
                WHERE x.run_no = r.run_no AND x.name = t.name AND x.signal_id = t.signal_id LIMIT 1) a ON true
        ), judged AS (
            SELECT f.*, CASE
                WHEN f.run_no IS NULL THEN 'F'
                WHEN f.expires_at > v_now THEN CASE WHEN f.payload_sha256 = f.digest THEN 'D' ELSE 'P' END
                WHEN f.expires_at IS NULL AND f.signal_id IS NOT NULL
                    AND holdfast.has_signal_1(f.run_no, f.name, f.signal_id, v_now - p_retention) THEN 'I'
                WHEN f.finished_at IS NOT NULL THEN 'T'
                WHEN f.is_waiting AND NOT holdfast.finds_wait_2(f.run_no, f.name, f.step_id,
                    holdfast.came_at_1(greatest(v_now, f.last_accepted_at + 1), v_now)) THEN 'W'
            END AS refusal
            FROM found f
        ), numbered AS (
            SELECT j.*, j.base + row_number() OVER (PARTITION BY j.run_no ORDER BY j.ord) AS seq,
                row_number() OVER (PARTITION BY j.run_no, j.is_uncounted ORDER BY j.ord) AS count
            FROM judged j WHERE j.refusal IS NULL
        ), paced AS (
            SELECT n.*, CASE
                WHEN n.is_uncounted OR n.seq <= p_most THEN NULL
                WHEN n.count > p_most THEN v_now
                ELSE (
                    SELECT x FROM holdfast.counted_1(n.run_no, p_most - n.count) AS x
                    WHERE x > v_now - 60000000 AND x <= v_now
                )
            END AS counted_from
            FROM numbered n
        ), limited AS (
            SELECT p.*, min(p.seq) FILTER (WHERE p.counted_from IS NOT NULL) OVER run AS first_over,
                bool_or(p.is_uncounted) OVER run AS is_mixed
            FROM paced p WINDOW run AS (PARTITION BY p.run_no)
        ), decided AS MATERIALIZED (
            SELECT l.*, coalesce(l.signal_id, holdfast.inbox_uuid_1(l.run_id, l.seq)) AS known_as,
                greatest(v_now, l.last_accepted_at + 1) + l.seq - l.base - 1 AS accepted_at,
                max(CASE WHEN l.seq = l.first_over THEN l.counted_from END) OVER (PARTITION BY l.run_no) AS over_from,
                CASE
                    WHEN l.first_over IS NULL OR l.seq < l.first_over THEN 'A'
                    WHEN l.seq = l.first_over OR NOT l.is_mixed THEN 'R'
                    ELSE 'N'
                END AS code
            FROM limited l
        ), accepted AS (
            INSERT INTO holdfast.signals
                (run_no, inbox_seq, name, signal_id, step_id, accepted_at, received_at, payload, by_caller)
            SELECT d.run_no, d.seq, d.name, d.known_as, d.step_id, d.accepted_at, v_now, d.payload, d.by_caller
            FROM decided d WHERE d.code = 'A'
        ), recorded AS (
            INSERT INTO holdfast.acceptance_records
                (run_no, name, signal_id, inbox_seq, payload_sha256, accepted_at, expires_at)
            SELECT d.run_no, d.name, d.known_as, d.seq, d.digest, d.accepted_at, d.accepted_at + p_retention
            FROM decided d WHERE d.code = 'A'
            ON CONFLICT (run_no, name, signal_id) DO UPDATE
            SET inbox_seq = excluded.inbox_seq, payload_sha256 = excluded.payload_sha256,
                accepted_at = excluded.accepted_at, expires_at = excluded.expires_at
        ), woken AS (
            UPDATE holdfast.runs r
            SET inbox_seq = x.seq, last_accepted_at = x.accepted_at, ready_at = least(r.ready_at, v_now)
            FROM (
                SELECT d.run_no, max(d.seq) AS seq, max(d.accepted_at) AS accepted_at
                FROM decided d WHERE d.code = 'A' GROUP BY d.run_no
            ) x
            WHERE r.run_no = ANY (ARRAY[x.run_no])
        )
        SELECT v_now, j.ord, j.refusal, j.status, j.known_seq, j.known_at FROM judged j WHERE j.refusal IS NOT NULL
        UNION ALL
        SELECT v_now, d.ord, d.code, d.status, d.seq, CASE WHEN d.code = 'A' THEN d.accepted_at ELSE d.over_from END
        FROM decided d;
    END IF;
    IF cardinality(m_ord) > 0 THEN
        RETURN QUERY
        WITH judged AS MATERIALIZED (
            SELECT t.*, r.run_no, r.status, CASE
                WHEN r.run_no IS NULL THEN 'F'
                WHEN (SELECT true FROM holdfast.messages m WHERE (m.run_no, m.signal_id) = (r.run_no, t.signal_id)) THEN 'D'
                WHEN r.finished_at IS NOT NULL THEN 'T'
                ELSE 'A'
            END AS code
            FROM unnest(m_ord, m_run, m_signal, m_due, m_message) AS t (ord, run_id, signal_id, due_at, message)
            LEFT JOIN holdfast.runs r ON r.run_id = t.run_id
        ), accepted AS (
            INSERT INTO holdfast.messages (run_no, signal_id, due_at, message)
            SELECT j.run_no, j.signal_id, coalesce(j.due_at, v_now), j.message FROM judged j WHERE j.code = 'A'
        ), woken AS (
            UPDATE holdfast.runs r SET ready_at = least(r.ready_at, x.due_at)
            FROM (
                SELECT j.run_no, min(coalesce(j.due_at, v_now)) AS due_at
                FROM judged j WHERE j.code = 'A' GROUP BY j.run_no
            ) x
            WHERE r.run_no = ANY (ARRAY[x.run_no]) AND (r.ready_at IS NULL OR r.ready_at > x.due_at)
        )
        SELECT v_now, j.ord, j.code, j.status, NULL::bigint, NULL::bigint FROM judged j;
    END IF;
    SELECT array_agg(r.run_no) INTO v_changed FROM holdfast.runs r
    WHERE r.run_id = ANY (s_run || m_run)
        AND r.ready_at IS DISTINCT FROM (SELECT a.ready_at FROM holdfast.agenda a WHERE a.run_no = r.run_no);
    IF v_changed IS NOT NULL THEN
        PERFORM holdfast.enter_1(v_changed, v_now);
    END IF;
END
$$;

-- One signal with conditions: those of deliver_2, with codes that come between T and W: L it is too late, S another
-- signal of its name waits for the step, V the run is at another version, which stands in place of the inbox number.
CREATE OR REPLACE FUNCTION holdfast.deliver_if_1(
    p_now bigint, p_retention bigint, p_most bigint,
    s_ord bigint[], s_run text[], s_name text[], s_signal text[], s_step text[], s_payload text[], s_digest bytea[],
    s_waiting boolean[], s_uncounted boolean[], s_by text[],
    m_ord bigint[], m_run text[], m_signal text[], m_due bigint[], m_message text[],
    p_version bigint, p_before bigint
) RETURNS TABLE (o_now bigint, o_ord bigint, o_code text, o_status text, o_seq bigint, o_at bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_run holdfast.runs%ROWTYPE;
    v_now bigint;
    v_code text;
    v_expires bigint;
BEGIN
    SELECT * INTO v_run FROM holdfast.runs r WHERE r.run_id = s_run[1] FOR UPDATE;
    v_now := holdfast.time_1(p_now);
    SELECT a.expires_at INTO v_expires FROM holdfast.acceptance_records a
    WHERE a.run_no = v_run.run_no AND a.name = s_name[1] AND a.signal_id = s_signal[1];
    IF v_run.finished_at IS NULL AND (v_expires IS NULL OR v_expires <= v_now) AND NOT (
        v_expires IS NULL AND s_signal[1] IS NOT NULL
        AND holdfast.has_signal_1(v_run.run_no, s_name[1], s_signal[1], v_now - p_retention)
    ) THEN
        v_code := CASE
            WHEN v_now >= p_before THEN 'L'
            WHEN p_version IS NOT NULL AND EXISTS (
                SELECT 1 FROM holdfast.signals s
                WHERE s.run_no = v_run.run_no AND s.consumed_seq IS NULL AND s.name = s_name[1]
                    AND s.step_id IS NOT DISTINCT FROM s_step[1]
            ) THEN 'S'
            WHEN p_version <> v_run.version THEN 'V'
        END;
    END IF;
    IF v_code IS NOT NULL THEN
        RETURN QUERY SELECT v_now, s_ord[1], v_code, v_run.status, v_run.version, NULL::bigint;
        RETURN;
    END IF;
    RETURN QUERY SELECT * FROM holdfast.deliver_2(v_now, p_retention, p_most, s_ord, s_run, s_name, s_signal, s_step,
        s_payload, s_digest, s_waiting, s_uncounted, s_by, m_ord, m_run, m_signal, m_due, m_message);
END
$$;

-- Messages of which some carry outcomes of attempts: that of the attempt which acquired a job last takes the job from its
-- queue. The attempt before the next has acquired it, unless the run has just put it there for the next one. L: the job was acquired again, and the message is for the latest attempt only. O: the step was opened at another time,
-- so the message is of a deleted run that had this id. What is known, or comes too late for its run, is answered by deliver_2.
-- A job may hold a NUL that somebody wrote, which JSON functions refuse: none of it is looked at here.
CREATE OR REPLACE FUNCTION holdfast.deliver_outcomes_2(
    p_now bigint, p_retention bigint, p_most bigint,
    s_ord bigint[], s_run text[], s_name text[], s_signal text[], s_step text[], s_payload text[], s_digest bytea[],
    s_waiting boolean[], s_uncounted boolean[], s_by text[],
    m_ord bigint[], m_run text[], m_signal text[], m_due bigint[], m_message text[],
    m_step text[], m_attempt bigint[], m_latest boolean[], m_opened bigint[]
) RETURNS TABLE (o_now bigint, o_ord bigint, o_code text, o_status text, o_seq bigint, o_at bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint;
    v_run bigint;
    v_acquired bigint;
    v_scheduled bigint;
    v_kept int[] := '{}';
BEGIN
    PERFORM 1 FROM holdfast.runs WHERE run_id = ANY (s_run || m_run) ORDER BY run_id FOR UPDATE;
    v_now := holdfast.time_1(p_now);
    FOR i IN 1..cardinality(m_ord) LOOP
        v_acquired := NULL;
        IF m_attempt[i] IS NOT NULL THEN
            SELECT r.run_no INTO v_run FROM holdfast.runs r
            WHERE r.run_id = m_run[i] AND r.finished_at IS NULL
                AND NOT EXISTS (
                    SELECT 1 FROM holdfast.messages m WHERE (m.run_no, m.signal_id) = (r.run_no, m_signal[i])
                );
            SELECT j.next_attempt - 1, (replace(j.job, '\u0000', '\u0001')::json ->> 'scheduled_at')::bigint
            INTO v_acquired, v_scheduled
            FROM holdfast.jobs j
            WHERE j.run_no = v_run AND j.step_id = m_step[i] AND j.queue <> '' FOR UPDATE;
        END IF;
        IF v_acquired IS NOT NULL AND v_scheduled <> 0 AND m_opened[i] NOT IN (0, v_scheduled) THEN
            RETURN QUERY SELECT v_now, m_ord[i], 'O', NULL::text, NULL::bigint, NULL::bigint;
        ELSIF v_acquired > m_attempt[i] AND m_latest[i] THEN
            RETURN QUERY SELECT v_now, m_ord[i], 'L', NULL::text, NULL::bigint, NULL::bigint;
        ELSE
            v_kept := v_kept || i;
            IF v_acquired = m_attempt[i] THEN
                UPDATE holdfast.jobs j SET visible_at = NULL, taken_by = NULL
                WHERE j.run_no = v_run AND j.step_id = m_step[i] AND CASE WHEN j.taken_by IS NOT NULL THEN true
                    ELSE (replace(j.job, '\u0000', '\u0001')::jsonb ->> 'queued_attempt_id')::bigint BETWEEN 1 AND m_attempt[i] END;
            END IF;
        END IF;
    END LOOP;
    RETURN QUERY SELECT * FROM holdfast.deliver_2(v_now, p_retention, p_most, s_ord, s_run, s_name, s_signal, s_step,
        s_payload, s_digest, s_waiting, s_uncounted, s_by,
        ARRAY(SELECT m_ord[k] FROM unnest(v_kept) AS k), ARRAY(SELECT m_run[k] FROM unnest(v_kept) AS k),
        ARRAY(SELECT m_signal[k] FROM unnest(v_kept) AS k), ARRAY(SELECT m_due[k] FROM unnest(v_kept) AS k),
        ARRAY(SELECT m_message[k] FROM unnest(v_kept) AS k));
END
$$;

CREATE OR REPLACE FUNCTION holdfast.numbers_1(p_run_ids text[]) RETURNS bigint[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN ARRAY(
        SELECT r.run_no FROM unnest(p_run_ids) AS i (run_id) CROSS JOIN LATERAL (
            SELECT x.run_no FROM holdfast.runs x WHERE x.run_id = i.run_id LIMIT 1
        ) r
    );
END
$$;

-- Release these runs of a node, or all of them and its lease.
CREATE OR REPLACE FUNCTION holdfast.release_1(
    p_now bigint, p_node text, p_run_ids text[], OUT o_now bigint, OUT o_freed bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_runs bigint[];
BEGIN
    IF p_run_ids IS NULL THEN
        DELETE FROM holdfast.nodes WHERE node = p_node;  -- first: nothing is claimed for it or handed to it from here on
        v_runs := ARRAY(SELECT a.run_no FROM holdfast.agenda a WHERE a.owner = p_node);
    ELSE
        v_runs := holdfast.numbers_1(p_run_ids);
    END IF;
    v_runs := ARRAY(
        SELECT r.run_no FROM holdfast.runs r
        WHERE r.run_no = ANY (v_runs) AND r.lease_owner = p_node ORDER BY r.run_id || '' FOR UPDATE OF r
    );
    o_now := holdfast.time_1(p_now);
    UPDATE holdfast.runs r
    SET lease_owner = NULL, lease_epoch = r.lease_epoch + 1, ready_at = least(r.ready_at, o_now)
    WHERE r.run_no = ANY (v_runs);
    PERFORM holdfast.enter_1(v_runs, o_now);
    o_freed := cardinality(v_runs);
END
$$;

-- Give runs of a node to another node, ready at once, if that has a lease. It cannot be released meanwhile: then it
-- would own runs without being there.
CREATE OR REPLACE FUNCTION holdfast.hand_over_2(
    p_now bigint, p_node text, p_run_ids text[], p_to text, OUT o_now bigint, OUT o_given text[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_runs bigint[];
BEGIN
    o_now := holdfast.time_1(p_now);
    o_given := '{}';
    PERFORM 1 FROM holdfast.nodes WHERE node = p_to AND holdfast.lease_end_1(lease_until, o_now) > o_now FOR KEY SHARE;
    IF NOT FOUND OR p_to = p_node THEN
        RETURN;
    END IF;
    v_runs := holdfast.numbers_1(p_run_ids);
    v_runs := ARRAY(
        SELECT r.run_no FROM holdfast.runs r
        WHERE r.run_no = ANY (v_runs) AND r.lease_owner = p_node ORDER BY r.run_id || '' FOR UPDATE OF r
    );
    o_now := holdfast.time_1(p_now);
    WITH given AS (
        UPDATE holdfast.runs r
        SET lease_owner = p_to, lease_epoch = r.lease_epoch + 1, ready_at = least(r.ready_at, o_now)
        WHERE r.run_no = ANY (v_runs) RETURNING r.run_id
    )
    SELECT coalesce(array_agg(g.run_id), '{}') INTO o_given FROM given g;
    PERFORM holdfast.enter_1(v_runs, o_now);
END
$$;

-- Acquire jobs: longest visible first, then in order of their runs' creation and of step ids.
CREATE OR REPLACE FUNCTION holdfast.take_1(
    p_now bigint, p_node text, p_queues text[], p_activities text[], p_limit bigint, p_visible bigint
) RETURNS TABLE (o_now bigint, o_attempt bigint, o_details text, o_job text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint := holdfast.time_1(p_now);
    v_found record;
BEGIN
    FOR v_found IN
        SELECT j.run_no, j.step_id
        FROM (SELECT DISTINCT x.queue FROM unnest(p_queues) AS x (queue)) q CROSS JOIN LATERAL (
            SELECT x.run_no, x.step_id, x.visible_at FROM holdfast.jobs x
            WHERE x.queue = q.queue AND x.visible_at IS NOT NULL AND x.visible_at <= v_now
                AND x.activity = ANY (p_activities)
            ORDER BY x.visible_at, x.run_no, x.step_id LIMIT p_limit FOR UPDATE SKIP LOCKED
        ) j
        ORDER BY j.visible_at, j.run_no, j.step_id LIMIT p_limit
    LOOP
        RETURN QUERY
        UPDATE holdfast.jobs j
        SET visible_at = v_now + p_visible, taken_by = p_node, next_attempt = j.next_attempt + 1
        WHERE j.run_no = v_found.run_no AND j.step_id = v_found.step_id
        RETURNING v_now, j.next_attempt - 1, j.details, j.job;
    END LOOP;
END
$$;

-- Acquire jobs that have room under their limits, in order of the limits' names: `core/call_limits.py` has the rule, and a
-- test compares the two. Each limit is decided under the lock of its row, so that no two count at the same time. Its lines
-- are looked at in the order of their turns, each by a look into an index, until one has room. The last row has no job.
CREATE OR REPLACE FUNCTION holdfast.take_limited_1(
    p_now bigint, p_node text, p_queues text[], p_activities text[], p_limit bigint, p_visible bigint,
    p_names text[], p_at_once bigint[], p_per_key bigint[], p_calls bigint[], p_period bigint[],
    p_key_calls bigint[], p_key_period bigint[]
) RETURNS TABLE (o_now bigint, o_next bigint, o_attempt bigint, o_details text, o_job text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint := holdfast.time_1(p_now);
    v_next bigint;
    v_left bigint := p_limit;
    v_name text := '';
    v_of int;
    v_last text;
    v_last_key text;
    v_tenant text;
    v_key text;
    v_found text;
    v_is_second boolean;
    v_is_second_key boolean;
    v_inside bigint;
    v_expires bigint;
    v_free bigint;
    v_line_free bigint;
    v_earliest bigint;
    v_is_given boolean;
    v_run bigint;
    v_step text;
BEGIN
    IF NOT EXISTS (
        SELECT FROM unnest(p_queues) AS q (queue) CROSS JOIN LATERAL (
            SELECT FROM holdfast.jobs j
            WHERE j.queue = q.queue AND j.visible_at IS NOT NULL AND j.activity = ANY (p_activities) LIMIT 1
        ) x
    ) THEN  -- nothing is there that a place could be for
        RETURN QUERY SELECT v_now, NULL::bigint, NULL::bigint, NULL::text, NULL::text;
        RETURN;
    END IF;
    WHILE v_left > 0 LOOP
        SELECT j.limit_name INTO v_found FROM holdfast.jobs j
        WHERE j.limit_name > v_name AND j.visible_at IS NOT NULL ORDER BY j.limit_name LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_name := v_found;
        INSERT INTO holdfast.limit_turns (name, tenant, last) VALUES (v_name, '', '') ON CONFLICT DO NOTHING;
        PERFORM 1 FROM holdfast.limit_turns t WHERE t.name = v_name AND t.tenant = '' FOR UPDATE;
        v_now := holdfast.time_1(p_now);
        v_of := array_position(p_names, v_name);
        <<calls>>
        WHILE v_left > 0 LOOP
            v_is_given := false;
            v_earliest := NULL;
            v_free := 0;
            v_expires := NULL;
            IF p_at_once[v_of] IS NOT NULL OR p_per_key[v_of] IS NOT NULL THEN
                SELECT count(*), min(j.visible_at) INTO v_inside, v_expires FROM holdfast.jobs j
                WHERE j.limit_name = v_name AND j.visible_at > v_now AND j.taken_by IS NOT NULL;
                IF v_inside >= p_at_once[v_of] THEN
                    v_next := least(v_next, v_expires);
                    EXIT calls;
                END IF;
            END IF;
            IF p_calls[v_of] IS NOT NULL THEN
                SELECT b.begun_at + p_period[v_of] INTO v_free FROM holdfast.limit_begins b
                WHERE b.name = v_name ORDER BY b.begun_at DESC LIMIT 1 OFFSET p_calls[v_of] - 1;
                v_free := coalesce(v_free, 0);
            END IF;
            SELECT t.last INTO v_last FROM holdfast.limit_turns t WHERE t.name = v_name AND t.tenant = '';
            v_tenant := v_last;
            v_is_second := false;
            <<tenants>>
            LOOP
                SELECT j.limit_tenant INTO v_found FROM holdfast.jobs j
                WHERE j.limit_name = v_name AND j.limit_tenant > v_tenant AND j.visible_at IS NOT NULL
                ORDER BY j.limit_tenant LIMIT 1;
                IF NOT FOUND OR (v_is_second AND v_found > v_last) THEN
                    EXIT tenants WHEN v_is_second;
                    v_is_second := true;
                    v_tenant := '';
                    CONTINUE tenants;
                END IF;
                v_tenant := v_found;
                SELECT t.last INTO v_last_key FROM holdfast.limit_turns t WHERE t.name = v_name AND t.tenant = v_tenant;
                v_key := v_last_key;
                v_is_second_key := v_last_key IS NULL;
                <<keys>>
                LOOP
                    SELECT j.limit_key INTO v_found FROM holdfast.jobs j
                    WHERE j.limit_name = v_name AND j.limit_tenant = v_tenant AND j.visible_at IS NOT NULL
                        AND CASE WHEN v_key IS NULL THEN true ELSE j.limit_key > v_key END
                        AND j.limit_key >= coalesce(v_key, '')
                    ORDER BY j.limit_key LIMIT 1;
                    IF NOT FOUND OR (v_is_second_key AND v_found > v_last_key) THEN
                        EXIT keys WHEN v_is_second_key;
                        v_is_second_key := true;
                        v_key := NULL;
                        CONTINUE keys;
                    END IF;
                    v_key := v_found;
                    PERFORM 1 FROM holdfast.jobs j
                    WHERE j.limit_name = v_name AND j.limit_tenant = v_tenant AND j.limit_key = v_key
                        AND j.visible_at <= v_now AND j.queue = ANY (p_queues) AND j.activity = ANY (p_activities)
                    ORDER BY j.visible_at LIMIT 1;
                    CONTINUE keys WHEN NOT FOUND;
                    IF p_per_key[v_of] IS NOT NULL THEN
                        SELECT count(*) INTO v_inside FROM holdfast.jobs j
                        WHERE j.limit_name = v_name AND j.limit_tenant = v_tenant AND j.limit_key = v_key
                            AND j.visible_at > v_now AND j.taken_by IS NOT NULL;
                        CONTINUE keys WHEN v_inside >= p_per_key[v_of];
                    END IF;
                    v_line_free := v_free;
                    IF p_key_calls[v_of] IS NOT NULL THEN
                        SELECT greatest(v_free, b.begun_at + p_key_period[v_of]) INTO v_line_free
                        FROM holdfast.limit_begins b
                        WHERE b.name = v_name AND b.tenant = v_tenant AND b.key = v_key
                        ORDER BY b.begun_at DESC LIMIT 1 OFFSET p_key_calls[v_of] - 1;
                        v_line_free := coalesce(v_line_free, v_free);
                    END IF;
                    IF v_line_free > v_now THEN
                        v_earliest := least(v_earliest, v_line_free);
                        EXIT tenants WHEN v_earliest = v_free;
                        CONTINUE keys;
                    END IF;
                    SELECT j.run_no, j.step_id INTO v_run, v_step FROM holdfast.jobs j
                    WHERE j.limit_name = v_name AND j.limit_tenant = v_tenant AND j.limit_key = v_key
                        AND j.visible_at <= v_now AND j.queue = ANY (p_queues) AND j.activity = ANY (p_activities)
                    ORDER BY j.visible_at, j.run_no, j.step_id LIMIT 1 FOR UPDATE SKIP LOCKED;
                    v_is_given := FOUND;
                    EXIT tenants WHEN v_is_given;
                END LOOP;
            END LOOP;
            IF NOT v_is_given THEN
                v_next := least(v_next, coalesce(v_earliest, v_expires));
                EXIT calls;
            END IF;
            RETURN QUERY
            UPDATE holdfast.jobs j
            SET visible_at = v_now + p_visible, taken_by = p_node, next_attempt = j.next_attempt + 1
            WHERE j.run_no = v_run AND j.step_id = v_step
            RETURNING v_now, NULL::bigint, j.next_attempt - 1, j.details, j.job;
            v_left := v_left - 1;
            INSERT INTO holdfast.limit_turns AS t (name, tenant, last)
            VALUES (v_name, '', v_tenant), (v_name, v_tenant, v_key)
            ON CONFLICT (name, tenant) DO UPDATE SET last = excluded.last;
            IF p_calls[v_of] IS NOT NULL OR p_key_calls[v_of] IS NOT NULL THEN
                DELETE FROM holdfast.limit_begins b
                WHERE b.name = v_name AND b.begun_at <= v_now - greatest(p_period[v_of], p_key_period[v_of]);
                INSERT INTO holdfast.limit_begins (name, begun_at, tenant, key)
                VALUES (v_name, v_now, v_tenant, v_key);
            END IF;
        END LOOP;
    END LOOP;
    RETURN QUERY SELECT v_now, least(v_next, (
        SELECT min(d.visible_at) FROM unnest(p_queues) AS q (queue) CROSS JOIN LATERAL (
            SELECT x.visible_at FROM holdfast.jobs x
            WHERE x.queue = q.queue AND x.visible_at > v_now AND x.activity = ANY (p_activities)
            ORDER BY x.visible_at LIMIT 1
        ) d
    )), NULL::bigint, NULL::text, NULL::text;
END
$$;

-- Heartbeats: keep the jobs and steps that the node still has.
CREATE OR REPLACE FUNCTION holdfast.beat_1(
    p_now bigint, p_node text, p_visible bigint,
    b_run text[], b_step text[], b_queue text[], b_attempt bigint[], b_details text[],
    OUT o_now bigint, OUT o_kept boolean[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_run bigint;
    v_owner text;
    v_is_kept boolean;
BEGIN
    PERFORM 1 FROM holdfast.runs WHERE run_id = ANY (b_run) ORDER BY run_id FOR UPDATE;
    o_now := holdfast.time_1(p_now);
    o_kept := '{}';
    FOR i IN 1..cardinality(b_run) LOOP
        SELECT r.run_no, r.lease_owner INTO v_run, v_owner FROM holdfast.runs r WHERE r.run_id = b_run[i];
        IF b_queue[i] <> '' THEN
            UPDATE holdfast.jobs j
            SET visible_at = o_now + p_visible, details = coalesce(b_details[i], j.details)
            WHERE j.run_no = v_run AND j.step_id = b_step[i]
                AND j.taken_by = p_node AND j.next_attempt = b_attempt[i] + 1
                AND (j.limit_name IS NULL OR j.visible_at > o_now);  -- one that is late has lost its place
            o_kept := o_kept || FOUND;
        ELSE
            PERFORM 1 FROM holdfast.jobs j WHERE j.run_no = v_run AND j.step_id = b_step[i] AND j.queue <> '';
            v_is_kept := v_owner IS NOT DISTINCT FROM p_node AND NOT FOUND;
            o_kept := o_kept || v_is_kept;
            IF v_is_kept AND b_details[i] IS NOT NULL THEN
                INSERT INTO holdfast.jobs (run_no, step_id, queue, activity, next_attempt, details)
                VALUES (v_run, b_step[i], '', '', 0, b_details[i])
                ON CONFLICT (run_no, step_id) DO UPDATE SET details = excluded.details;
            END IF;
        END IF;
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION holdfast.note_growth_1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO holdfast.growth (xid, runs, with_tasks)
    SELECT pg_current_xact_id()::text::bigint, array_agg(run_no),
        array_agg(run_no) FILTER (WHERE starts_with(event_type, 'Task'))
    FROM grown HAVING count(*) > 0;
    IF EXISTS (SELECT FROM holdfast.sinks) THEN
        INSERT INTO holdfast.outbox AS o (sink_no, run_no, from_seq, to_seq, at, attempts, due_at)
        SELECT s.sink_no, g.run_no, g.from_seq, g.to_seq, g.at, 0, g.at
        FROM (
            SELECT run_no, min(run_seq) AS from_seq, max(run_seq) AS to_seq, max(persisted_at) AS at
            FROM grown GROUP BY run_no
        ) g
        -- By the key, whatever the server believes about the table: a plan that reads all of it would be kept.
        CROSS JOIN LATERAL (SELECT tenant, plan_id FROM holdfast.runs WHERE run_no = g.run_no LIMIT 1) r
        JOIN holdfast.sinks s ON (s.tenant IS NULL OR s.tenant = r.tenant)
            AND (s.workflows IS NULL OR r.plan_id = ANY (s.workflows))
        ON CONFLICT (sink_no, run_no, from_seq) DO UPDATE SET to_seq = greatest(o.to_seq, excluded.to_seq);
    END IF;
    RETURN NULL;
END
$$;

-- A page of what a sink has yet to get, with the runs that it is of. However long the backlog is, and whatever the server
-- believes about it, the entries of the page alone are read.
CREATE OR REPLACE FUNCTION holdfast.outbox_1(p_sink text, p_run bigint, p_seq bigint, p_limit bigint)
RETURNS TABLE (
    o_run bigint, o_run_id text, o_from bigint, o_to bigint, o_at bigint, o_attempts bigint, o_due bigint, o_tenant text,
    o_project text, o_environment text, o_plan text, o_version text
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET enable_sort = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_sink bigint;
BEGIN
    SELECT s.sink_no INTO v_sink FROM holdfast.sinks s WHERE s.name = p_sink;
    RETURN QUERY
    SELECT o.run_no, r.run_id, o.from_seq, o.to_seq, o.at, o.attempts, o.due_at, r.tenant, r.project, r.environment,
        r.plan_id, r.plan_version
    FROM holdfast.outbox o LEFT JOIN LATERAL (SELECT * FROM holdfast.runs x WHERE x.run_no = o.run_no LIMIT 1) r ON true
    WHERE o.sink_no = v_sink AND (o.run_no, o.from_seq) > (p_run, p_seq)
    ORDER BY o.run_no, o.from_seq LIMIT p_limit;
END
$$;

-- Delete entries of a sink that are as they were found; return which.
CREATE OR REPLACE FUNCTION holdfast.take_outbox_1(
    p_sink bigint, p_runs bigint[], p_from bigint[], p_to bigint[], p_attempts bigint[]
) RETURNS TABLE (o_run bigint, o_from bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
    DELETE FROM holdfast.outbox o USING unnest(p_runs, p_from, p_to, p_attempts) AS x (run_no, from_seq, to_seq, attempts)
    WHERE o.sink_no = p_sink AND o.run_no = x.run_no AND o.from_seq = x.from_seq AND o.to_seq = x.to_seq
        AND o.attempts = x.attempts
    RETURNING o.run_no, o.from_seq;
END
$$;

-- Transactions are numbered from the beginning again in a server that was filled from a dump; then all is forgotten.
-- A transaction that has waited has an earlier time than the one before it: only a clock that was set back counts as due.
CREATE OR REPLACE FUNCTION holdfast.forget_growth_1(p_now bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_lost bigint;
    v_ended bigint;
    v_forgotten bigint;
    v_snapshot pg_snapshot := pg_current_snapshot();
BEGIN
    SELECT k.lost_before, k.ended_before INTO v_lost, v_ended FROM holdfast.growth_kept k
    WHERE k.noted_at NOT BETWEEN p_now - 30000000 AND p_now + 30000000 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v_ended > pg_snapshot_xmax(v_snapshot)::text::bigint THEN
        DELETE FROM holdfast.growth WHERE xid >= pg_snapshot_xmax(v_snapshot)::text::bigint;
        v_lost := 0;
    ELSE
        WITH forgotten AS (
            DELETE FROM holdfast.growth WHERE xid >= v_lost AND xid < v_ended RETURNING xid
        )
        SELECT max(xid) + 1 INTO v_forgotten FROM forgotten;
    END IF;
    UPDATE holdfast.growth_kept
    SET lost_before = coalesce(v_forgotten, v_lost), ended_before = pg_snapshot_xmin(v_snapshot)::text::bigint,
        noted_at = p_now;
END
$$;

DO $do$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_trigger WHERE tgname = 'events_growth' AND tgrelid = 'holdfast.events'::regclass) THEN
        CREATE TRIGGER events_growth AFTER INSERT ON holdfast.events REFERENCING NEW TABLE AS grown
            FOR EACH STATEMENT EXECUTE FUNCTION holdfast.note_growth_1();
    END IF;
END
$do$;

-- A queued run has messages that are due at no time, 2^62: it is not ready for them. A run that starts or finishes takes
-- no lock of its queue: the next transaction that holds it counts what is written here.
CREATE OR REPLACE FUNCTION holdfast.leave_1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status IN ('PENDING', 'APPROVED') AND NEW.status NOT IN ('PENDING', 'APPROVED')
        AND (SELECT g.is_starting FROM holdfast.gate_runs g WHERE g.number = OLD.gate_no) THEN
        INSERT INTO holdfast.gate_started (plan_id, number, started_at)
        VALUES (OLD.plan_id, OLD.gate_no, NEW.updated_at) ON CONFLICT DO NOTHING;
    END IF;
    IF NEW.finished_at IS NOT NULL AND OLD.finished_at IS NULL THEN
        INSERT INTO holdfast.gate_exits (plan_id, number) VALUES (OLD.plan_id, OLD.gate_no);
        NEW.queued_at := NULL;
    END IF;
    NEW.ready_at := nullif(NEW.ready_at, 4611686018427387904);
    RETURN NEW;
END
$$;

-- Count runs of a tenant and key in or out, and keep which queued one of them is first.
CREATE OR REPLACE FUNCTION holdfast.count_1(p_plan text, p_tenant text, p_key text, p_inside int, p_waiting int)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_per_key bigint;
    v_place bigint;
    v_number bigint;
BEGIN
    UPDATE holdfast.gates SET inside = inside + p_inside, waiting = waiting + p_waiting,
        last_tenant = CASE WHEN p_inside > 0 THEN p_tenant ELSE last_tenant END
    WHERE plan_id = p_plan RETURNING per_key INTO v_per_key;
    SELECT g.place, g.number INTO v_place, v_number FROM holdfast.gate_runs g
    WHERE g.plan_id = p_plan AND g.tenant = p_tenant AND g.key = p_key AND NOT g.is_inside
    ORDER BY g.place, g.number LIMIT 1;
    INSERT INTO holdfast.gate_lines AS l (plan_id, tenant, key, inside, per_key, place, number)
    VALUES (p_plan, p_tenant, p_key, p_inside, v_per_key, v_place, v_number)
    ON CONFLICT (plan_id, tenant, key) DO UPDATE
    SET inside = l.inside + excluded.inside, place = excluded.place, number = excluded.number;
    IF v_place IS NULL THEN
        DELETE FROM holdfast.gate_lines l
        WHERE l.plan_id = p_plan AND l.tenant = p_tenant AND l.key = p_key AND l.inside = 0;
    END IF;
END
$$;

-- Record an instant of the rate. A later commit may have begun a little earlier: instants only grow.
CREATE OR REPLACE FUNCTION holdfast.record_start_1(p_plan text, p_at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
BEGIN
    UPDATE holdfast.gates SET last_start = last_start + 1, starting = starting - 1
    WHERE plan_id = p_plan RETURNING last_start INTO v_last;
    INSERT INTO holdfast.gate_starts (plan_id, number, starts_at)
    VALUES (p_plan, v_last, greatest(p_at, (
        SELECT least(s.starts_at, p_at + 1000000) FROM holdfast.gate_starts s
        WHERE s.plan_id = p_plan AND s.number = v_last - 1
    )));
END
$$;

-- Count the runs that have started and those that have left since the lock of the queue was held last.
CREATE OR REPLACE FUNCTION holdfast.count_exits_1(p_plan text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenants text[];
    v_keys text[];
    v_inside int[];
    v_numbers bigint[];
    v_instants bigint[];
    v_never bigint;
BEGIN
    WITH started AS (
        DELETE FROM holdfast.gate_started WHERE plan_id = p_plan RETURNING number, started_at
    )
    SELECT array_agg(number ORDER BY started_at, number), array_agg(started_at ORDER BY started_at, number)
    INTO v_numbers, v_instants FROM started;
    FOR i IN 1..coalesce(cardinality(v_numbers), 0) LOOP
        UPDATE holdfast.gate_runs SET is_starting = false WHERE number = v_numbers[i] AND is_starting;
        IF FOUND THEN
            PERFORM holdfast.record_start_1(p_plan, v_instants[i]);
        END IF;
    END LOOP;
    WITH exits AS (
        DELETE FROM holdfast.gate_exits WHERE plan_id = p_plan RETURNING number
    ), gone AS (
        DELETE FROM holdfast.gate_runs WHERE number = ANY (ARRAY(SELECT e.number FROM exits e))
        RETURNING tenant, key, is_inside, is_starting
    )
    SELECT array_agg(tenant), array_agg(key), array_agg(is_inside::int), count(*) FILTER (WHERE is_starting)
    INTO v_tenants, v_keys, v_inside, v_never FROM gone;
    IF v_never > 0 THEN
        UPDATE holdfast.gates SET starting = starting - v_never WHERE plan_id = p_plan;
    END IF;
    FOR i IN 1..coalesce(cardinality(v_inside), 0) LOOP
        PERFORM holdfast.count_1(p_plan, v_tenants[i], v_keys[i], -v_inside[i], v_inside[i] - 1);
    END LOOP;
END
$$;

-- Lock queues in order of the plans' names, make those that do not exist yet, and count the runs that have left.
CREATE OR REPLACE FUNCTION holdfast.lock_queues_1(p_plans text[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_plan text;
BEGIN
    FOR v_plan IN SELECT DISTINCT p.plan_id COLLATE "C" FROM unnest(p_plans) AS p (plan_id) ORDER BY 1 LOOP
        INSERT INTO holdfast.gates (plan_id) VALUES (v_plan) ON CONFLICT DO NOTHING;
        PERFORM 1 FROM holdfast.gates WHERE plan_id = v_plan FOR UPDATE;
        PERFORM holdfast.count_exits_1(v_plan);
    END LOOP;
END
$$;

-- Index the lines of a queue by this limit, if it was another one: which of them have room.
CREATE OR REPLACE FUNCTION holdfast.use_limit_1(p_plan text, p_per_key bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    p_per_key := coalesce(p_per_key, 4611686018427387904);
    UPDATE holdfast.gates SET per_key = p_per_key WHERE plan_id = p_plan AND per_key <> p_per_key;
    IF FOUND THEN
        UPDATE holdfast.gate_lines SET per_key = p_per_key WHERE plan_id = p_plan;
    END IF;
END
$$;

-- The first instant, from now on, at which the rate allows another start; the same as free_slot in core/admission.py.
-- Runs that have yet to start use up some of what it allows; if all, the answer is 2^62.
CREATE OR REPLACE FUNCTION holdfast.free_slot_1(p_plan text, p_starts bigint, p_period bigint, p_now bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_starting bigint;
    v_last bigint;
BEGIN
    IF p_starts IS NULL THEN
        RETURN p_now;
    END IF;
    SELECT g.starting, g.last_start INTO v_starting, v_last FROM holdfast.gates g WHERE g.plan_id = p_plan;
    RETURN CASE WHEN v_starting >= p_starts THEN 4611686018427387904 ELSE greatest(p_now, (
        SELECT s.starts_at + p_period FROM holdfast.gate_starts s
        WHERE s.plan_id = p_plan AND s.number = v_last - (p_starts - v_starting) + 1
    )) END;
END
$$;

-- The run that is next, if one has room but for the rate: of the tenant behind the last one, in a circle. This and
-- free_slot_1 are what decide_admission in core/admission.py says, over the first run of each line.
CREATE OR REPLACE FUNCTION holdfast.next_run_1(p_plan text, p_at_once bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_inside bigint;
    v_tenant text;
    v_number bigint;
BEGIN
    SELECT g.inside, g.last_tenant INTO v_inside, v_tenant FROM holdfast.gates g WHERE g.plan_id = p_plan;
    FOREACH v_tenant IN ARRAY ARRAY[v_tenant, ''] LOOP
        EXIT WHEN v_inside >= p_at_once;
        SELECT l.number INTO v_number FROM holdfast.gate_lines l
        WHERE l.plan_id = p_plan AND l.tenant > v_tenant AND l.place IS NOT NULL AND l.inside < l.per_key
        ORDER BY l.tenant, l.place, l.number LIMIT 1;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN v_number;
END
$$;

-- Admit up to p_most runs from one queue, as far as the queue is concerned, and return when to call again even if no run
-- leaves. Without p_new the runs are not touched: the caller locks them all and makes them ready. With it, it holds the
-- runs that this call creates; any other run is locked here, and stays queued if that would mean to wait for it.
CREATE OR REPLACE FUNCTION holdfast.admit_from_1(
    p_plan text, p_at_once bigint, p_starts bigint, p_period bigint, p_most bigint, p_now bigint, p_new bigint[],
    OUT o_numbers bigint[], OUT o_again bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_number bigint;
    v_free bigint;
    v_is_finished boolean;
BEGIN
    o_numbers := '{}';
    LOOP
        v_number := holdfast.next_run_1(p_plan, p_at_once);
        EXIT WHEN v_number IS NULL;
        v_free := holdfast.free_slot_1(p_plan, p_starts, p_period, p_now);
        IF v_free > p_now OR cardinality(o_numbers) >= p_most THEN
            o_again := nullif(v_free, 4611686018427387904);
            RETURN;
        END IF;
        IF p_new IS NOT NULL AND array_position(p_new, v_number) IS NULL THEN
            SELECT r.finished_at IS NOT NULL INTO v_is_finished
            FROM holdfast.runs r
            WHERE r.run_id = (SELECT g.run_id FROM holdfast.gate_runs g WHERE g.number = v_number)
                AND r.gate_no = v_number FOR UPDATE OF r SKIP LOCKED;
            EXIT WHEN NOT FOUND;
            IF v_is_finished THEN  -- since those that have left were counted
                INSERT INTO holdfast.gate_exits (plan_id, number) VALUES (p_plan, v_number) ON CONFLICT DO NOTHING;
                PERFORM holdfast.count_exits_1(p_plan);
                CONTINUE;
            END IF;
        END IF;
        UPDATE holdfast.gate_runs SET is_inside = true, is_starting = p_starts IS NOT NULL WHERE number = v_number;
        PERFORM holdfast.count_1(p_plan, g.tenant, g.key, 1, -1) FROM holdfast.gate_runs g WHERE g.number = v_number;
        IF p_starts IS NOT NULL THEN  -- and forget the instants that no longer matter
            UPDATE holdfast.gates SET starting = starting + 1 WHERE plan_id = p_plan;
            DELETE FROM holdfast.gate_starts s WHERE s.plan_id = p_plan
                AND s.number <= (SELECT g.last_start FROM holdfast.gates g WHERE g.plan_id = p_plan) - p_starts;
        END IF;
        o_numbers := o_numbers || v_number;
    END LOOP;
END
$$;

-- Release the messages that were held back while runs were queued. The locks of the runs are held.
CREATE OR REPLACE FUNCTION holdfast.make_ready_1(p_runs bigint[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE holdfast.messages SET due_at = p_now WHERE run_no = ANY (p_runs) AND due_at = 4611686018427387904;
    UPDATE holdfast.runs SET queued_at = NULL, ready_at = least(ready_at, p_now) WHERE run_no = ANY (p_runs);
END
$$;

-- Put new runs into their queues, one after the other, before they are created. For each: when its messages are due
-- (2^62: it is queued; NULL: it exists already), its number, and whether it starts now. o_others were admitted besides.
-- A run with the policy `reject` is alone; if it is rejected, as rejection in core/admission.py says, o_free is until when
-- the rate forbids it.
CREATE OR REPLACE FUNCTION holdfast.enqueue_1(
    p_now bigint, r_id text[], r_key bytea[], r_plan text[], r_tenant text[],
    t_key text[], t_ahead bigint[], t_at_once bigint[], t_per_key bigint[], t_starts bigint[], t_period bigint[],
    t_overload text[],
    OUT o_dues bigint[], OUT o_numbers bigint[], OUT o_starts boolean[], OUT o_others bigint[], OUT o_free bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_free bigint;
    v_admitted bigint[];
BEGIN
    o_dues := array_fill(NULL::bigint, ARRAY[cardinality(r_id)]);
    o_numbers := o_dues;
    o_starts := array_fill(false, ARRAY[cardinality(r_id)]);
    o_others := '{}';
    FOR i IN 1..cardinality(r_id) LOOP
        CONTINUE WHEN EXISTS (SELECT 1 FROM holdfast.runs WHERE request_key = r_key[i])
            OR EXISTS (SELECT 1 FROM holdfast.runs WHERE run_id = r_id[i]);
        PERFORM holdfast.use_limit_1(r_plan[i], t_per_key[i]);
        v_free := holdfast.free_slot_1(r_plan[i], t_starts[i], t_period[i], p_now);
        IF t_overload[i] = 'reject' AND (v_free > p_now OR holdfast.next_run_1(r_plan[i], t_at_once[i]) IS NOT NULL
            OR EXISTS (SELECT 1 FROM holdfast.gates WHERE plan_id = r_plan[i] AND inside >= t_at_once[i])
            OR EXISTS (SELECT 1 FROM holdfast.gate_lines WHERE plan_id = r_plan[i] AND tenant = r_tenant[i]
                AND key = t_key[i] AND inside >= t_per_key[i])) THEN
            o_free := CASE WHEN v_free = 4611686018427387904 THEN p_now + t_period[i] ELSE v_free END;
            RETURN;
        END IF;
        o_numbers[i] := nextval('holdfast.gate_numbers');
        INSERT INTO holdfast.gate_runs (number, plan_id, tenant, key, run_id, place)
        VALUES (o_numbers[i], r_plan[i], r_tenant[i], t_key[i], r_id[i], p_now - t_ahead[i]);
        PERFORM holdfast.count_1(r_plan[i], r_tenant[i], t_key[i], 0, 1);
        SELECT l.o_numbers INTO v_admitted
        FROM holdfast.admit_from_1(r_plan[i], t_at_once[i], t_starts[i], t_period[i], 1, p_now, o_numbers) l;
        o_dues[i] := 4611686018427387904;
        o_starts[i] := o_numbers[i] = ANY (v_admitted);
        CONTINUE WHEN v_admitted = '{}';
        IF array_position(o_numbers, v_admitted[1]) IS NULL THEN
            o_others := o_others || v_admitted;
        ELSE
            o_dues[array_position(o_numbers, v_admitted[1])] := p_now;
        END IF;
    END LOOP;
END
$$;

-- Put a run that exists into its queue, unless it has a place there, and admit the run that is next. The locks of the
-- queue and of the run are held, and its turn was committed: the messages of the turn are held back until it is admitted.
CREATE OR REPLACE FUNCTION holdfast.enqueue_again_1(
    p_now bigint, p_run text, p_seen bigint, p_messages text[],
    t_key text, t_ahead bigint, t_at_once bigint, t_per_key bigint, t_starts bigint, t_period bigint
) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_run record;
    v_number bigint;
    v_is_new boolean;
    v_admitted bigint[] := '{}';
    v_others bigint[];
BEGIN
    SELECT r.run_no, r.plan_id, r.tenant, r.gate_no, r.finished_at INTO v_run FROM holdfast.runs r WHERE r.run_id = p_run;
    IF v_run.finished_at IS NOT NULL OR EXISTS (
        SELECT 1 FROM holdfast.gate_runs g WHERE g.number = v_run.gate_no AND g.is_inside
    ) THEN
        RETURN;
    END IF;
    SELECT g.number INTO v_number FROM holdfast.gate_runs g WHERE g.number = v_run.gate_no;
    v_is_new := v_number IS NULL;
    IF v_is_new THEN
        PERFORM holdfast.use_limit_1(v_run.plan_id, t_per_key);
        v_number := nextval('holdfast.gate_numbers');
        INSERT INTO holdfast.gate_runs (number, plan_id, tenant, key, run_id, place)
        VALUES (v_number, v_run.plan_id, v_run.tenant, t_key, p_run, p_now - t_ahead);
        PERFORM holdfast.count_1(v_run.plan_id, v_run.tenant, t_key, 0, 1);
    END IF;
    UPDATE holdfast.messages SET due_at = 4611686018427387904
    WHERE run_no = v_run.run_no AND signal_id = ANY (p_messages);
    UPDATE holdfast.runs r SET gate_no = v_number, queued_at = coalesce(r.queued_at, p_now), ready_at = least(
        CASE WHEN r.inbox_seq > p_seen THEN p_now END,
        (SELECT nullif(min(m.due_at), 4611686018427387904) FROM holdfast.messages m WHERE m.run_no = r.run_no)
    ) WHERE r.run_no = v_run.run_no;
    IF v_is_new THEN
        SELECT l.o_numbers INTO v_admitted
        FROM holdfast.admit_from_1(v_run.plan_id, t_at_once, t_starts, t_period, 1, p_now, ARRAY[v_number]) l;
    END IF;
    v_others := ARRAY(SELECT p.run_no FROM holdfast.admitted_runs_1(v_admitted) p);
    PERFORM holdfast.make_ready_1(v_others, p_now);
    PERFORM holdfast.enter_1(v_run.run_no || v_others, p_now);
END
$$;

-- Create runs that all have admission requests. Arguments and answers are those of create_1, and the requests, the epoch
-- of what is the owner's, and the instant that goes with O: rejected, and nothing was created.
CREATE OR REPLACE FUNCTION holdfast.create_limited_1(
    p_now bigint, p_owner text,
    r_id text[], r_tenant text[], r_project text[], r_environment text[], r_plan text[], r_plan_version text[],
    r_request text[], r_key bytea[], r_input bytea[], r_parent text[], r_reference text[], r_tags text[],
    r_status text[], r_events bigint[], r_snapshot text[], r_due bigint[], r_is_due boolean[],
    e_run int[], e_seq bigint[], e_id text[], e_type text[], e_step text[], e_engine bigint[], e_logical bigint[],
    e_data text[], e_key bytea[], e_emitted bigint[], e_adapter text[], e_ref text[], e_cause text[],
    e_parent text[], e_schema bigint[],
    m_run int[], m_signal text[], m_due bigint[], m_message text[],
    p_more jsonb,
    t_key text[], t_ahead bigint[], t_at_once bigint[], t_per_key bigint[], t_starts bigint[], t_period bigint[],
    t_overload text[]
) RETURNS TABLE (
    o_now bigint, o_ord bigint, o_code text, o_run_id text, o_input bytea, o_epoch bigint, o_free bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint;
    v_queued record;
    v_codes text[];
    v_run_ids text[];
    v_inputs bytea[];
    v_runs bigint[];
    v_others bigint[];
BEGIN
    PERFORM holdfast.lock_queues_1(r_plan);
    v_now := holdfast.time_1(p_now);
    PERFORM 1 FROM holdfast.nodes WHERE node = p_owner AND holdfast.lease_end_1(lease_until, v_now) > v_now FOR KEY SHARE;
    IF p_owner IS NOT NULL AND NOT FOUND THEN
        RETURN QUERY SELECT v_now, 0::bigint, 'X', NULL::text, NULL::bytea, 0::bigint, NULL::bigint;
        RETURN;
    END IF;
    SELECT * INTO v_queued FROM holdfast.enqueue_1(v_now, r_id, r_key, r_plan, r_tenant, t_key, t_ahead, t_at_once,
        t_per_key, t_starts, t_period, t_overload);
    IF v_queued.o_free IS NOT NULL THEN
        RETURN QUERY SELECT v_now, 1::bigint, 'O', r_id[1], NULL::bytea, 0::bigint, v_queued.o_free;
        RETURN;
    END IF;
    r_due := ARRAY(
        SELECT CASE
            WHEN t.number IS NOT NULL OR t.due IS NOT NULL OR t.is_due THEN nullif(t.starts_at, 4611686018427387904)
        END
        FROM unnest(v_queued.o_dues, v_queued.o_numbers, r_due, r_is_due)
            WITH ORDINALITY AS t (starts_at, number, due, is_due, ord) ORDER BY t.ord
    );
    m_due := ARRAY(SELECT v_queued.o_dues[m.run] FROM unnest(m_run) WITH ORDINALITY AS m (run, ord) ORDER BY m.ord);
    SELECT array_agg(c.o_code ORDER BY c.o_ord), array_agg(c.o_run_id ORDER BY c.o_ord),
        array_agg(c.o_input ORDER BY c.o_ord)
    INTO v_codes, v_run_ids, v_inputs
    FROM holdfast.create_1(v_now, NULL, r_id, r_tenant, r_project, r_environment, r_plan, r_plan_version, r_request,
        r_key, r_input, r_parent, r_reference, r_tags, r_status, r_events, r_snapshot, r_due,
        array_fill(false, ARRAY[cardinality(r_id)]), e_run, e_seq, e_id, e_type, e_step, e_engine, e_logical, e_data,
        e_key, e_emitted, e_adapter, e_ref, e_cause, e_parent, e_schema, m_run, m_signal, m_due, m_message, p_more) c;
    IF EXISTS (
        SELECT 1 FROM unnest(v_codes, v_queued.o_dues) AS t (code, due) WHERE (t.code = 'C') <> (t.due IS NOT NULL)
    ) THEN  -- a run of this name was created or purged meanwhile, without admission
        RAISE EXCEPTION 'the runs that were created are not those that were queued' USING ERRCODE = 'serialization_failure';
    END IF;

    WITH changed AS (
        UPDATE holdfast.runs r
        SET gate_no = t.number, queued_at = CASE WHEN t.due = 4611686018427387904 THEN v_now END,
            lease_owner = CASE WHEN t.starts THEN p_owner END,
            lease_epoch = CASE WHEN t.starts AND p_owner IS NOT NULL THEN 1 ELSE 0 END
        FROM unnest(r_id, v_queued.o_dues, v_queued.o_numbers, v_queued.o_starts) AS t (run_id, due, number, starts)
        WHERE r.run_id = ANY (ARRAY[t.run_id]) AND (t.number IS NOT NULL OR t.starts)
        RETURNING r.run_no, r.lease_owner
    )
    SELECT array_agg(run_no) INTO v_runs FROM changed WHERE lease_owner IS NOT NULL;
    IF v_queued.o_others <> '{}' THEN
        v_others := ARRAY(SELECT p.run_no FROM holdfast.admitted_runs_1(v_queued.o_others) p);
        PERFORM holdfast.make_ready_1(v_others, v_now);
        v_runs := v_runs || v_others;
    END IF;
    IF v_runs IS NOT NULL THEN
        PERFORM holdfast.enter_1(v_runs, v_now);
    END IF;
    RETURN QUERY
    SELECT v_now, t.ord, t.code, t.run_id, t.input, CASE WHEN r.lease_owner = p_owner THEN r.lease_epoch ELSE 0 END,
        NULL::bigint
    FROM unnest(v_codes, v_run_ids, v_inputs) WITH ORDINALITY AS t (code, run_id, input, ord)
    LEFT JOIN holdfast.runs r ON r.run_id = t.run_id;
END
$$;

-- The runs that have these numbers, in their order, and whether they have no owner; without those that have finished.
CREATE OR REPLACE FUNCTION holdfast.admitted_runs_1(p_numbers bigint[]) RETURNS TABLE (run_no bigint, is_free boolean)
LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT r.run_no, r.lease_owner IS NULL
    FROM unnest(p_numbers) WITH ORDINALITY AS t (number, ord) CROSS JOIN LATERAL (
        SELECT x.* FROM holdfast.runs x
        WHERE x.run_id = (SELECT g.run_id FROM holdfast.gate_runs g WHERE g.number = t.number) LIMIT 1
    ) r
    WHERE r.gate_no = t.number AND r.finished_at IS NULL ORDER BY t.ord;
END
$$;

-- Admit runs of these plans, which are in order of their names. The code is X if the node's lease is not current: if it
-- was when this began, runs may have been admitted, and have no owner. o_free says which had none before.
CREATE OR REPLACE FUNCTION holdfast.admit_1(
    p_now bigint, p_node text, p_limit bigint,
    l_plan text[], l_at_once bigint[], l_per_key bigint[], l_starts bigint[], l_period bigint[],
    OUT o_now bigint, OUT o_code text, OUT o_again bigint, OUT o_runs bigint[], OUT o_free boolean[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_plans text[];
    v_numbers bigint[] := '{}';
    v_one record;
BEGIN
    o_now := holdfast.time_1(p_now);
    IF NOT EXISTS (SELECT 1 FROM holdfast.nodes WHERE node = p_node AND holdfast.lease_end_1(lease_until, o_now) > o_now) THEN
        o_code := CASE WHEN p_node IS NOT NULL THEN 'X' END;
    END IF;
    -- Where no run is queued and none has left, a run that is queued next misses nothing.
    v_plans := ARRAY(
        SELECT g.plan_id FROM holdfast.gates g WHERE g.plan_id = ANY (l_plan) AND (
            g.waiting > 0 OR (SELECT true FROM holdfast.gate_exits e WHERE e.plan_id = g.plan_id LIMIT 1))
    );
    IF o_code IS NOT NULL OR v_plans = '{}' THEN
        RETURN;
    END IF;
    PERFORM holdfast.lock_queues_1(v_plans);
    o_now := holdfast.time_1(p_now);
    FOR i IN 1..cardinality(l_plan) LOOP
        CONTINUE WHEN NOT l_plan[i] = ANY (v_plans);
        PERFORM holdfast.use_limit_1(l_plan[i], l_per_key[i]);
        SELECT * INTO v_one FROM holdfast.admit_from_1(l_plan[i], l_at_once[i], l_starts[i], l_period[i],
            p_limit - cardinality(v_numbers), o_now, NULL);
        v_numbers := v_numbers || v_one.o_numbers;
        o_again := least(o_again, v_one.o_again);
    END LOOP;
    IF v_numbers = '{}' THEN
        RETURN;
    END IF;
    PERFORM 1 FROM holdfast.runs
    WHERE run_id = ANY (ARRAY(SELECT run_id FROM holdfast.gate_runs WHERE number = ANY (v_numbers)))
    ORDER BY run_id FOR UPDATE;
    SELECT array_agg(p.run_no), array_agg(p.is_free) INTO o_runs, o_free FROM holdfast.admitted_runs_1(v_numbers) p;
    IF cardinality(o_runs) IS DISTINCT FROM cardinality(v_numbers) THEN  -- one has finished meanwhile: there is room
        o_again := o_now;
    END IF;
    PERFORM holdfast.make_ready_1(o_runs, o_now);
    PERFORM 1 FROM holdfast.nodes WHERE node = p_node AND holdfast.lease_end_1(lease_until, o_now) > o_now FOR KEY SHARE;
    IF FOUND THEN
        UPDATE holdfast.runs SET lease_owner = p_node, lease_epoch = lease_epoch + 1
        WHERE run_no = ANY (o_runs) AND lease_owner IS NULL;
    ELSIF p_node IS NOT NULL THEN
        o_code := 'X';
    END IF;
    PERFORM holdfast.enter_1(o_runs, o_now);
END
$$;

-- Runs with what waits for them, as of one instant, and since when each is queued. Of a mailbox of more than `p_most`
-- signals, only what open waits can take is looked at, and the engine's own: of each name the oldest so many.
CREATE OR REPLACE FUNCTION holdfast.loaded_3(p_runs bigint[], p_now bigint, p_most bigint)
RETURNS TABLE (
    run_no bigint, run_id text, tenant text, project text, environment text, plan_id text, plan_version text,
    run_request_id text, parent_run_id text, reference_key text, tags text, status text, version bigint,
    snapshot text, created_at bigint, updated_at bigint, finished_at bigint, inbox_seq bigint, ready_at bigint,
    lease_owner text, lease_epoch bigint, queued_at bigint, losses bigint, o_now bigint, messages text[], s_seq bigint[],
    s_name text[], s_signal text[], s_step text[], s_at bigint[], s_payload text[], s_received bigint[],
    s_by text[], is_whole boolean, records text[], d_step text[], d_details text[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
    SELECT r.run_no, r.run_id, r.tenant, r.project, r.environment, r.plan_id, r.plan_version, r.run_request_id,
        r.parent_run_id, r.reference_key, r.tags, r.status, r.version, r.snapshot, r.created_at, r.updated_at,
        r.finished_at, r.inbox_seq, r.ready_at, r.lease_owner, r.lease_epoch, r.queued_at, r.losses, p_now,
        m.messages, s.seqs, s.names, s.signals, s.steps, s.ats, s.payloads, s.receiveds, s.bys,
        f.is_full IS NULL, c.records, d.steps, d.details
    FROM (
        SELECT * FROM unnest(p_runs) WITH ORDINALITY LIMIT cardinality(p_runs)  -- as in commit_1
    ) AS t (no, ord)
    JOIN holdfast.runs r ON r.run_no = ANY (ARRAY[t.no])
    LEFT JOIN LATERAL (
        SELECT array_agg(x.message ORDER BY x.due_at, x.signal_id) AS messages
        FROM holdfast.messages x WHERE x.run_no = r.run_no AND x.due_at <= p_now
    ) m ON true
    LEFT JOIN LATERAL (
        SELECT true AS is_full FROM holdfast.signals y
        WHERE r.inbox_seq > p_most AND y.run_no = r.run_no AND y.consumed_seq IS NULL OFFSET p_most LIMIT 1
    ) f ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(x.inbox_seq) AS seqs, array_agg(x.name) AS names, array_agg(x.signal_id) AS signals,
            array_agg(x.step_id) AS steps, array_agg(x.accepted_at) AS ats, array_agg(x.payload) AS payloads,
            array_agg(x.received_at) AS receiveds, array_agg(x.by_caller) AS bys
        FROM (
            SELECT y.inbox_seq, y.name, y.signal_id, y.step_id, y.accepted_at, y.payload, y.received_at,
                y.by_caller
            FROM holdfast.signals y
            WHERE f.is_full IS NULL AND r.inbox_seq > 0 AND y.run_no = r.run_no AND y.consumed_seq IS NULL
            UNION ALL
            SELECT z.* FROM (
                SELECT w.name FROM holdfast.waits w WHERE f.is_full AND w.run_no = r.run_no
                UNION SELECT 'holdfast' || o.own FROM unnest(ARRAY['.control', '.update', '.task']) AS o (own) WHERE f.is_full
            ) n CROSS JOIN LATERAL (
                SELECT y.inbox_seq, y.name, y.signal_id, y.step_id, y.accepted_at, y.payload, y.received_at,
                y.by_caller
                FROM holdfast.signals y
                WHERE y.run_no = r.run_no AND y.name = n.name AND y.consumed_seq IS NULL
                    AND (y.step_id IS NULL OR (SELECT true FROM holdfast.waits w
                        WHERE w.run_no = y.run_no AND w.step_id = y.step_id AND w.name = y.name))
                ORDER BY y.inbox_seq LIMIT p_most
            ) z
            UNION ALL
            SELECT y.inbox_seq, y.name, y.signal_id, y.step_id, y.accepted_at, y.payload, y.received_at,
                y.by_caller
            FROM holdfast.signals y
            WHERE f.is_full AND y.run_no = r.run_no AND y.name = 'holdfast' || '.outcome' AND y.consumed_seq IS NULL
            ORDER BY 1
        ) x
    ) s ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(x.record ORDER BY x.activity_name, x.step_id, x.idempotency_key) AS records
        FROM holdfast.activity_records x WHERE x.run_no = r.run_no AND NOT x.is_completed
    ) c ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(x.step_id) AS steps, array_agg(x.details) AS details
        FROM holdfast.jobs x WHERE x.run_no = r.run_no AND x.details IS NOT NULL
    ) d ON true
    ORDER BY t.ord;
END
$$;

DO $do$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_trigger WHERE tgname = 'runs_leave' AND tgrelid = 'holdfast.runs'::regclass) THEN
        CREATE TRIGGER runs_leave BEFORE UPDATE OF finished_at ON holdfast.runs
            FOR EACH ROW WHEN (OLD.gate_no IS NOT NULL) EXECUTE FUNCTION holdfast.leave_1();
    END IF;
END
$do$;

-- The runs that a node may claim, and since when. `p_from` are the places from which rows may be live: of runs
-- without an owner and of the node's own, in order and late. Streams 1 to 4 are these four, 5 are runs of lost nodes.
-- A definition in `p_plans` is one text: a plan's id, a line break, and its version; no name has a line break in it.
CREATE OR REPLACE FUNCTION holdfast.eligible_2(p_now bigint, p_node text, p_limit bigint, p_plans text[], p_from bigint[])
RETURNS TABLE (o_stream int, o_place bigint, o_since bigint, o_run bigint, o_owner text) LANGUAGE plpgsql
ROWS 1 AS $$  -- so that each of them is looked up
DECLARE
    v_owner text;
BEGIN
    FOR side IN 0..1 LOOP
        v_owner := CASE side WHEN 0 THEN '' ELSE p_node END;
        RETURN QUERY
        SELECT 1 + 2 * side, a.place, a.ready_at, a.run_no, a.owner FROM holdfast.agenda a
        WHERE a.owner = v_owner AND a.lane = 0 AND a.place >= p_from[1 + 2 * side] AND a.place <= p_now
            AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans))
        ORDER BY a.place, a.run_no LIMIT p_limit;
        RETURN QUERY
        SELECT 2 + 2 * side, min(a.place) OVER (), a.ready_at, a.run_no, a.owner FROM holdfast.agenda a
        WHERE a.owner = v_owner AND a.lane = 1 AND a.place >= p_from[2 + 2 * side] AND a.ready_at <= p_now
            AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans))
        ORDER BY a.ready_at, a.run_no LIMIT p_limit;
    END LOOP;
    RETURN QUERY
    SELECT 5, 0::bigint, least(n.lease_until, p_now), a.run_no, n.node FROM holdfast.nodes n
    CROSS JOIN LATERAL (
        SELECT x.run_no FROM holdfast.agenda x
        WHERE x.owner = n.node AND (p_plans IS NULL OR x.plan_id || E'\n' || x.plan_version = ANY (p_plans))
        ORDER BY x.run_no + 0 LIMIT p_limit  -- not in the order of another index, past everybody else's
    ) a
    WHERE holdfast.lease_end_1(n.lease_until, p_now) <= p_now AND n.node <> p_node;
END
$$;

-- Claim runs for a node: those that were eligible for longest, then in order of creation. Runs that another transaction
-- holds are passed over. The answer's places are where the next claim may start; none if the lease is not current.
CREATE OR REPLACE FUNCTION holdfast.claim_2(
    p_now bigint, p_node text, p_limit bigint, p_plans text[], p_from bigint[],
    OUT o_now bigint, OUT o_from bigint[], OUT o_runs bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_safe bigint;
    v_changed bigint[];
BEGIN
    o_now := holdfast.time_1(p_now);
    PERFORM 1 FROM holdfast.nodes WHERE node = p_node AND holdfast.lease_end_1(lease_until, o_now) > o_now FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_safe := o_now - 2000000;  -- what is being committed now was entered later than that
    WITH eligible AS MATERIALIZED (
        SELECT * FROM holdfast.eligible_2(o_now, p_node, least(p_limit * 4, p_limit + 1000), p_plans, p_from)
    ), chosen AS (
        SELECT r.run_no, e.o_since AS since
        FROM eligible e JOIN holdfast.runs r ON r.run_no = ANY (ARRAY[e.o_run])
        WHERE coalesce(r.lease_owner, '') = e.o_owner AND (e.o_stream = 5 OR r.ready_at <= o_now)
        ORDER BY e.o_since, e.o_run LIMIT p_limit
        FOR UPDATE OF r SKIP LOCKED
    )
    SELECT (SELECT array_agg(c.run_no ORDER BY c.since, c.run_no) FROM chosen c),
        ARRAY[least(v_safe, min(o_place) FILTER (WHERE o_stream = 1)),
            least(v_safe, min(o_place) FILTER (WHERE o_stream = 2)),
            least(v_safe, min(o_place) FILTER (WHERE o_stream = 3)),
            least(v_safe, min(o_place) FILTER (WHERE o_stream = 4))]
    INTO o_runs, o_from FROM eligible;
    IF o_runs IS NOT NULL THEN
        WITH taken AS (
            UPDATE holdfast.runs
            SET lease_owner = p_node, lease_epoch = lease_epoch + 1, ready_at = least(ready_at, o_now),
                losses = losses + (lease_owner IS NOT NULL AND losses < 2)::int  -- limits.SUSPECT_LOSSES
            WHERE run_no = ANY (o_runs) AND lease_owner IS DISTINCT FROM p_node
            RETURNING run_no
        )
        SELECT array_agg(run_no) INTO v_changed FROM taken;
        UPDATE holdfast.agenda  -- as enter_1 would, without reading the runs again
        SET owner = p_node, ready_at = least(ready_at, o_now), lane = CASE WHEN ready_at < o_now - 1000000 THEN 1 ELSE 0 END,
            place = CASE WHEN ready_at < o_now - 1000000 THEN o_now ELSE least(ready_at, o_now) END
        WHERE run_no = ANY (v_changed);
    END IF;
END
$$;

-- When such a claim may find something, or acquire_jobs from these queues.
CREATE OR REPLACE FUNCTION holdfast.next_due_2(
    p_now bigint, p_node text, p_plans text[], p_queues text[], p_from bigint[], OUT o_now bigint, OUT o_due bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    o_now := holdfast.time_1(p_now);
    SELECT least(
        (SELECT a.place FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 0 AND a.place >= p_from[1]
                AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans)) ORDER BY a.place LIMIT 1),
        (SELECT min(a.ready_at) FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 1 AND a.place >= p_from[2]
                AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans))),
        (SELECT a.place FROM holdfast.agenda a
            WHERE a.owner = p_node AND a.lane = 0 AND a.place >= p_from[3]
                AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans)) ORDER BY a.place LIMIT 1),
        (SELECT min(a.ready_at) FROM holdfast.agenda a
            WHERE a.owner = p_node AND a.lane = 1 AND a.place >= p_from[4]
                AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans))),
        -- The newest places first: there a row is most likely to be live.
        (SELECT min(holdfast.lease_end_1(n.lease_until, o_now)) FROM holdfast.nodes n
            WHERE n.node <> p_node AND (
                SELECT true FROM holdfast.agenda a
                WHERE a.owner = n.node AND (p_plans IS NULL OR a.plan_id || E'\n' || a.plan_version = ANY (p_plans))
                ORDER BY a.owner DESC, a.lane DESC, a.place DESC LIMIT 1
            )),
        (SELECT min(j.visible_at) FROM unnest(p_queues) AS q (queue) CROSS JOIN LATERAL (
            SELECT x.visible_at FROM holdfast.jobs x
            WHERE x.queue = q.queue AND x.visible_at IS NOT NULL ORDER BY x.visible_at LIMIT 1
        ) j)
    ) INTO o_due;
END
$$;

-- Give a node its lease; `p_plans` is what it can run, NULL leaves what it has said before. Nodes that are lost and
-- own nothing are removed, unless a claim for them is under way. The lives of the node's name, if it has any, are
-- between p_first and p_last. A life that starts ends the leases of the others, and lets their jobs be taken; one that
-- lost its lease to another life, which is current, gets no lease. Lives that start at the same time wait for each other.
CREATE OR REPLACE FUNCTION holdfast.renew_3(
    p_now bigint, p_node text, p_lease bigint, p_plans text[], p_is_start boolean, p_first text, p_last text,
    OUT o_now bigint, OUT o_until bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_gone text[];
    v_until bigint;
BEGIN
    IF p_first IS NOT NULL AND p_is_start THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('holdfast.nodes ' || p_first, 0));
    END IF;
    SELECT n.lease_until INTO v_until FROM holdfast.nodes n WHERE n.node = p_node FOR UPDATE;
    o_now := holdfast.time_1(p_now);
    IF p_first IS NOT NULL AND p_is_start THEN
        UPDATE holdfast.nodes n SET lease_until = least(n.lease_until, o_now)
        WHERE n.node > p_first AND n.node < p_last AND n.node <> p_node;
        UPDATE holdfast.jobs j SET visible_at = o_now
        WHERE j.taken_by > p_first AND j.taken_by < p_last AND j.taken_by <> p_node AND j.visible_at > o_now;
    ELSIF p_first IS NOT NULL AND coalesce(holdfast.lease_end_1(v_until, o_now), 0) <= o_now THEN
        PERFORM 1 FROM holdfast.nodes n
        WHERE n.node > p_first AND n.node < p_last AND n.node <> p_node
            AND holdfast.lease_end_1(n.lease_until, o_now) > o_now;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    o_until := o_now + p_lease;
    INSERT INTO holdfast.nodes AS n (node, lease_until, plans) VALUES (p_node, o_until, p_plans)
    ON CONFLICT (node) DO UPDATE
    SET lease_until = excluded.lease_until, plans = coalesce(excluded.plans, n.plans);
    v_gone := ARRAY(SELECT n.node FROM holdfast.nodes n
        WHERE holdfast.lease_end_1(n.lease_until, o_now) <= o_now FOR UPDATE SKIP LOCKED);
    DELETE FROM holdfast.nodes n
    WHERE n.node = ANY (v_gone) AND (SELECT 1 FROM holdfast.agenda a WHERE a.owner = n.node LIMIT 1) IS NULL;
END
$$;

-- The definitions that no live node has, of runs that have been eligible since then. Of each kind of run some thousand
-- are looked at: what no node claims has waited for longest.
CREATE OR REPLACE FUNCTION holdfast.missing_2(p_now bigint, p_late bigint)
RETURNS TABLE (o_plan text, o_version text, o_since bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now bigint := holdfast.time_1(p_now);
    v_late bigint := v_now - p_late;
BEGIN
    RETURN QUERY
    WITH late AS MATERIALIZED (
        (SELECT a.plan_id, a.plan_version, a.ready_at AS since FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 0 AND a.place <= v_late ORDER BY a.place LIMIT 1000)
        UNION ALL
        (SELECT a.plan_id, a.plan_version, a.ready_at FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 1 ORDER BY a.place LIMIT 1000)
        UNION ALL
        SELECT a.plan_id, a.plan_version, least(n.lease_until, v_now) FROM holdfast.nodes n CROSS JOIN LATERAL (
            SELECT x.plan_id, x.plan_version FROM holdfast.agenda x WHERE x.owner = n.node LIMIT 1000
        ) a
        WHERE holdfast.lease_end_1(n.lease_until, v_now) <= v_now
    ), plans AS (
        SELECT l.plan_id, l.plan_version, min(l.since) AS since FROM late l WHERE l.since <= v_late GROUP BY 1, 2
    )
    SELECT p.plan_id, p.plan_version, p.since FROM plans p
    WHERE NOT EXISTS (  -- what a node has is compared without the level of a run
        SELECT 1 FROM holdfast.nodes n
        WHERE holdfast.lease_end_1(n.lease_until, v_now) > v_now
            AND (n.plans IS NULL OR p.plan_id || E'\n' || split_part(p.plan_version, E'\n', 1) = ANY (n.plans))
    )
    ORDER BY p.since, p.plan_id, p.plan_version;
END
$$;

-- For nodes of an earlier release, which leave alone what needs a level.
CREATE OR REPLACE FUNCTION holdfast.missing_1(p_now bigint, p_late bigint)
RETURNS TABLE (o_plan text, o_version text, o_since bigint) LANGUAGE sql AS $$
    SELECT m.o_plan, m.o_version, m.o_since FROM holdfast.missing_2(p_now, p_late) m
    WHERE strpos(m.o_version, E'\n') = 0
$$;
