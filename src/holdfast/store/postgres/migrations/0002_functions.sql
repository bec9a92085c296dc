-- oldest reader: 1
-- What a verb does, as one function each: one round trip and one transaction for a whole batch. Every statement sees
-- what was committed before it began, so what is read after the locks are held is true until the end.
-- A function is never changed once it is released: nodes of both versions call it during a rolling upgrade. A new
-- version has the next number in its name. The plans are the same whatever the tables hold and whenever they are made:
-- for each item, look into an index. The settings of each function leave the planner no other way, and tables that
-- are mostly small are looked into item by item, never joined: who takes them for empty would walk through dead rows.

-- When a lease ends: at once, if it was given by a clock so far ahead that nobody can mean it.
CREATE FUNCTION holdfast.lease_end_1(p_until bigint, p_now bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_until <= p_now + 7200000000 THEN p_until ELSE p_now END
$$;

CREATE FUNCTION holdfast.time_1(p_now bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(p_now, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- The same as core.idempotency.inbox_uuid.
CREATE FUNCTION holdfast.inbox_uuid_1(p_run_id text, p_seq bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT substr(key, 1, 8) || '-' || substr(key, 9, 4) || '-8' || substr(key, 14, 3) || '-'
        || translate(substr(key, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab') || substr(key, 18, 3) || '-'
        || substr(key, 21, 12)
    FROM encode(sha256(convert_to(p_run_id || '|inbox|' || p_seq, 'UTF8')), 'hex') AS key
$$;

-- Enter runs into the agenda as they now are, or take them off it. The locks of the runs are held.
CREATE FUNCTION holdfast.enter_1(p_runs bigint[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
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
        ready_at, plan_id, plan_version
    FROM holdfast.runs
    WHERE run_no = ANY (p_runs) AND (lease_owner IS NOT NULL OR ready_at IS NOT NULL)
    ON CONFLICT (run_no) DO UPDATE
    SET owner = excluded.owner, lane = excluded.lane, place = excluded.place, ready_at = excluded.ready_at;
END
$$;

-- --- commit -----------------------------------------------------------------------------------------------------------

-- What only some turns have. `p_numbers` holds the run of each turn, 0 if the turn lost.
CREATE FUNCTION holdfast.commit_more_1(p_more jsonb, p_numbers bigint[], p_now bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_more ? 'received' THEN
        -- By the rows' places: joined by their keys, they could be found by walking through all that are unconsumed.
        UPDATE holdfast.signals s SET consumed_seq = x.run_seq
        FROM (
            SELECT y.run_seq, z.ctid AS place
            FROM jsonb_to_recordset(p_more -> 'received') AS y (turn int, inbox_seq bigint, run_seq bigint)
            CROSS JOIN LATERAL (
                SELECT o.ctid FROM holdfast.signals o
                WHERE o.run_no = p_numbers[y.turn] AND o.inbox_seq = y.inbox_seq AND o.consumed_seq IS NULL LIMIT 1
            ) z
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

-- Turns of different runs. Verdicts: 0 committed, 1 no such run, 2 version, 3 epoch, 4 finished, 5 cannot be stored.
-- A turn that would append an event again, or open a second task, makes the whole call fail: the caller finds out which.
CREATE FUNCTION holdfast.commit_1(
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
                WHEN t.is_unfit THEN 5
                ELSE 0
            END AS verdict
        FROM unnest(p_run_ids, p_versions, p_epochs, p_counts, p_ends, p_unfit)
            WITH ORDINALITY AS t (run_id, version, epoch, events, is_end, is_unfit, ord)
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
        SET status = t.status, version = t.version + t.events, snapshot = t.snapshot, updated_at = o_now,
            finished_at = CASE WHEN t.is_end THEN coalesce(r.finished_at, o_now) END,
            lease_owner = CASE WHEN NOT t.is_end AND NOT t.is_release THEN r.lease_owner END,
            ready_at = CASE WHEN NOT t.is_end THEN least(
                CASE WHEN r.inbox_seq > t.seen THEN o_now END,
                (SELECT min(m.due_at) FROM holdfast.messages m WHERE m.run_no = r.run_no)
            ) END
        FROM unnest(v_numbers, p_versions, p_counts, p_statuses, p_snapshots, p_ends, p_seen, p_releases, v_owners,
            v_readies) AS t (run_no, version, events, status, snapshot, is_end, seen, is_release, owner, ready_at)
        WHERE r.run_no = t.run_no
        RETURNING r.run_no, (r.lease_owner, r.ready_at) IS DISTINCT FROM (t.owner, t.ready_at) AS is_changed
    )
    SELECT array_agg(run_no) INTO v_changed FROM written WHERE is_changed;
    IF v_changed IS NOT NULL THEN
        PERFORM holdfast.enter_1(v_changed, o_now);
    END IF;
END
$$;

-- --- create -----------------------------------------------------------------------------------------------------------

-- Codes: C created, K the request is known (its run and the digest of its input are given), T the run id is taken;
-- a single row with X if the owner's lease is not current.
CREATE FUNCTION holdfast.create_1(
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
        n.ready_at, n.plan, n.plan_version
    FROM (
        SELECT t.run_no, t.plan, t.plan_version, least(t.due, CASE WHEN t.is_due THEN v_now END) AS ready_at
        FROM unnest(v_numbers, r_plan, r_plan_version, r_due, r_is_due) AS t (run_no, plan, plan_version, due, is_due)
    ) n
    WHERE n.run_no > 0 AND (p_owner IS NOT NULL OR n.ready_at IS NOT NULL);

    RETURN QUERY
    SELECT v_now, t.ord, CASE WHEN t.run_no > 0 THEN 'C' WHEN k.run_no IS NOT NULL THEN 'K' ELSE 'T' END,
        coalesce(k.run_id, t.id), k.input_sha256
    FROM unnest(v_numbers, r_id, r_key) WITH ORDINALITY AS t (run_no, id, key, ord)
    LEFT JOIN holdfast.runs k ON t.run_no = 0 AND k.request_key = t.key;
END
$$;

-- --- deliver ----------------------------------------------------------------------------------------------------------

-- Say whether a signal would be taken, after those ahead of it have taken their waits; the same as guards.finds_wait.
CREATE FUNCTION holdfast.finds_wait_1(p_run bigint, p_name text, p_step text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_free text[];
    v_step text;
    v_is_taken boolean;
BEGIN
    v_free := ARRAY(
        SELECT step_id FROM holdfast.waits WHERE run_no = p_run AND name = p_name
        ORDER BY since,
            CASE WHEN substring(token FROM '[^@]*$') ~ '^[0-9]+$' THEN substring(token FROM '[^@]*$')::numeric ELSE 0 END,
            step_id
    );
    FOR v_step IN
        SELECT a.step_id FROM (
            SELECT step_id, inbox_seq FROM holdfast.signals
            WHERE run_no = p_run AND consumed_seq IS NULL AND name = p_name
            UNION ALL SELECT p_step, 9223372036854775807
        ) a ORDER BY a.inbox_seq
    LOOP
        v_step := coalesce(v_step, v_free[1]);
        v_is_taken := coalesce(v_step = ANY (v_free), false);
        IF v_is_taken THEN
            v_free := array_remove(v_free, v_step);
        END IF;
    END LOOP;
    RETURN v_is_taken;
END
$$;

-- Whether a run has a signal of this id. In the order of its index, so that no other index will do: a run may have many.
CREATE FUNCTION holdfast.has_signal_1(p_run bigint, p_name text, p_signal text, p_after bigint) RETURNS boolean
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
CREATE FUNCTION holdfast.counted_1(p_run bigint, p_back bigint) RETURNS bigint LANGUAGE plpgsql STABLE
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
CREATE FUNCTION holdfast.deliver_1(
    p_now bigint, p_retention bigint, p_most bigint,
    s_ord bigint[], s_run text[], s_name text[], s_signal text[], s_step text[], s_payload text[], s_digest bytea[],
    s_waiting boolean[], s_uncounted boolean[],
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
            FROM unnest(s_ord, s_run, s_name, s_signal, s_step, s_payload, s_digest, s_waiting, s_uncounted)
                AS t (ord, run_id, name, signal_id, step_id, payload, digest, is_waiting, is_uncounted)
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
                WHEN f.is_waiting AND NOT holdfast.finds_wait_1(f.run_no, f.name, f.step_id) THEN 'W'
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
            SELECT l.*, greatest(v_now, l.last_accepted_at + 1) + l.seq - l.base - 1 AS accepted_at,
                max(CASE WHEN l.seq = l.first_over THEN l.counted_from END) OVER (PARTITION BY l.run_no) AS over_from,
                CASE
                    WHEN l.first_over IS NULL OR l.seq < l.first_over THEN 'A'
                    WHEN l.seq = l.first_over OR NOT l.is_mixed THEN 'R'
                    ELSE 'N'
                END AS code
            FROM limited l
        ), accepted AS (
            INSERT INTO holdfast.signals
                (run_no, inbox_seq, name, signal_id, step_id, accepted_at, received_at, payload)
            SELECT d.run_no, d.seq, d.name, coalesce(d.signal_id, holdfast.inbox_uuid_1(d.run_id, d.seq)),
                d.step_id, d.accepted_at, v_now, d.payload
            FROM decided d WHERE d.code = 'A'
        ), recorded AS (
            INSERT INTO holdfast.acceptance_records
                (run_no, name, signal_id, inbox_seq, payload_sha256, accepted_at, expires_at)
            SELECT d.run_no, d.name, coalesce(d.signal_id, holdfast.inbox_uuid_1(d.run_id, d.seq)), d.seq,
                d.digest, d.accepted_at, d.accepted_at + p_retention
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
            WHERE r.run_no = x.run_no
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
            WHERE r.run_no = x.run_no AND (r.ready_at IS NULL OR r.ready_at > x.due_at)
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
