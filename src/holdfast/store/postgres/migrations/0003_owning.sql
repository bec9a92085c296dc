-- oldest reader: 1
-- Loading, owning and queues, as functions. What is said of functions in 0002 holds here too.

-- Runs with what waits for them, as of one instant.
CREATE FUNCTION holdfast.loaded_1(p_runs bigint[], p_now bigint)
RETURNS TABLE (
    run_no bigint, run_id text, tenant text, project text, environment text, plan_id text, plan_version text,
    run_request_id text, parent_run_id text, reference_key text, tags text, status text, version bigint,
    snapshot text, created_at bigint, updated_at bigint, finished_at bigint, inbox_seq bigint, ready_at bigint,
    lease_owner text, lease_epoch bigint, o_now bigint, messages text[], s_seq bigint[], s_name text[],
    s_signal text[], s_step text[], s_at bigint[], s_payload text[], records text[], d_step text[], d_details text[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
    SELECT r.run_no, r.run_id, r.tenant, r.project, r.environment, r.plan_id, r.plan_version, r.run_request_id,
        r.parent_run_id, r.reference_key, r.tags, r.status, r.version, r.snapshot, r.created_at, r.updated_at,
        r.finished_at, r.inbox_seq, r.ready_at, r.lease_owner, r.lease_epoch, p_now,
        m.messages, s.seqs, s.names, s.signals, s.steps, s.ats, s.payloads, c.records, d.steps, d.details
    FROM unnest(p_runs) WITH ORDINALITY AS t (no, ord)
    JOIN holdfast.runs r ON r.run_no = t.no
    LEFT JOIN LATERAL (
        SELECT array_agg(x.message ORDER BY x.due_at, x.signal_id) AS messages
        FROM holdfast.messages x WHERE x.run_no = r.run_no AND x.due_at <= p_now
    ) m ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(x.inbox_seq) AS seqs, array_agg(x.name) AS names, array_agg(x.signal_id) AS signals,
            array_agg(x.step_id) AS steps, array_agg(x.accepted_at) AS ats, array_agg(x.payload) AS payloads
        FROM (
            SELECT y.inbox_seq, y.name, y.signal_id, y.step_id, y.accepted_at, y.payload FROM holdfast.signals y
            WHERE y.run_no = r.run_no AND y.consumed_seq IS NULL ORDER BY y.inbox_seq
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

CREATE FUNCTION holdfast.numbers_1(p_run_ids text[]) RETURNS bigint[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN ARRAY(
        SELECT r.run_no FROM unnest(p_run_ids) AS i (run_id) CROSS JOIN LATERAL (
            SELECT x.run_no FROM holdfast.runs x WHERE x.run_id = i.run_id LIMIT 1
        ) r
    );
END
$$;

-- The runs that a node may claim, and since when. `p_from` are the places where something may be alive: of nobody's
-- runs and of the node's own, in order and late. Streams 1 to 4 are these four, 5 are runs of nodes that are gone.
CREATE FUNCTION holdfast.eligible_1(p_now bigint, p_node text, p_limit bigint, p_plans text[], p_from bigint[])
RETURNS TABLE (o_stream int, o_place bigint, o_since bigint, o_run bigint, o_owner text) LANGUAGE plpgsql AS $$
DECLARE
    v_owner text;
BEGIN
    FOR side IN 0..1 LOOP
        v_owner := CASE side WHEN 0 THEN '' ELSE p_node END;
        RETURN QUERY
        SELECT 1 + 2 * side, a.place, a.ready_at, a.run_no, a.owner FROM holdfast.agenda a
        WHERE a.owner = v_owner AND a.lane = 0 AND a.place >= p_from[1 + 2 * side] AND a.place <= p_now
            AND (p_plans IS NULL OR a.plan_id = ANY (p_plans))
        ORDER BY a.place, a.run_no LIMIT p_limit;
        RETURN QUERY
        SELECT 2 + 2 * side, min(a.place) OVER (), a.ready_at, a.run_no, a.owner FROM holdfast.agenda a
        WHERE a.owner = v_owner AND a.lane = 1 AND a.place >= p_from[2 + 2 * side] AND a.ready_at <= p_now
            AND (p_plans IS NULL OR a.plan_id = ANY (p_plans))
        ORDER BY a.ready_at, a.run_no LIMIT p_limit;
    END LOOP;
    RETURN QUERY
    SELECT 5, 0::bigint, least(n.lease_until, p_now), a.run_no, n.node FROM holdfast.nodes n
    CROSS JOIN LATERAL (
        SELECT x.run_no FROM holdfast.agenda x
        WHERE x.owner = n.node AND (p_plans IS NULL OR x.plan_id = ANY (p_plans))
        ORDER BY x.run_no + 0 LIMIT p_limit  -- not in the order of another index, past everybody else's
    ) a
    WHERE holdfast.lease_end_1(n.lease_until, p_now) <= p_now AND n.node <> p_node;
END
$$;

-- Take runs for a node: those that were eligible for longest, then in order of creation. Runs that somebody else is
-- busy with are passed over. The answer's places are where the next claim may start; none if the lease is not current.
CREATE FUNCTION holdfast.claim_1(
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
        SELECT * FROM holdfast.eligible_1(o_now, p_node, least(p_limit * 4, p_limit + 1000), p_plans, p_from)
    ), chosen AS (
        SELECT r.run_no, e.o_since AS since
        FROM eligible e JOIN holdfast.runs r ON r.run_no = e.o_run
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
            SET lease_owner = p_node, lease_epoch = lease_epoch + 1, ready_at = least(ready_at, o_now)
            WHERE run_no = ANY (o_runs) AND lease_owner IS DISTINCT FROM p_node
            RETURNING run_no
        )
        SELECT array_agg(run_no) INTO v_changed FROM taken;
        IF v_changed IS NOT NULL THEN
            PERFORM holdfast.enter_1(v_changed, o_now);
        END IF;
    END IF;
END
$$;

-- When such a claim may find something, or a take from these queues.
CREATE FUNCTION holdfast.next_due_1(
    p_now bigint, p_node text, p_plans text[], p_queues text[], p_from bigint[], OUT o_now bigint, OUT o_due bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    o_now := holdfast.time_1(p_now);
    SELECT least(
        (SELECT a.place FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 0 AND a.place >= p_from[1]
                AND (p_plans IS NULL OR a.plan_id = ANY (p_plans)) ORDER BY a.place LIMIT 1),
        (SELECT min(a.ready_at) FROM holdfast.agenda a
            WHERE a.owner = '' AND a.lane = 1 AND a.place >= p_from[2]
                AND (p_plans IS NULL OR a.plan_id = ANY (p_plans))),
        (SELECT a.place FROM holdfast.agenda a
            WHERE a.owner = p_node AND a.lane = 0 AND a.place >= p_from[3]
                AND (p_plans IS NULL OR a.plan_id = ANY (p_plans)) ORDER BY a.place LIMIT 1),
        (SELECT min(a.ready_at) FROM holdfast.agenda a
            WHERE a.owner = p_node AND a.lane = 1 AND a.place >= p_from[4]
                AND (p_plans IS NULL OR a.plan_id = ANY (p_plans))),
        -- The newest places first: there somebody is most likely to be alive.
        (SELECT min(holdfast.lease_end_1(n.lease_until, o_now)) FROM holdfast.nodes n
            WHERE n.node <> p_node AND (
                SELECT true FROM holdfast.agenda a
                WHERE a.owner = n.node AND (p_plans IS NULL OR a.plan_id = ANY (p_plans))
                ORDER BY a.owner DESC, a.lane DESC, a.place DESC LIMIT 1
            )),
        (SELECT min(j.visible_at) FROM unnest(p_queues) AS q (queue) CROSS JOIN LATERAL (
            SELECT x.visible_at FROM holdfast.jobs x
            WHERE x.queue = q.queue AND x.visible_at IS NOT NULL ORDER BY x.visible_at LIMIT 1
        ) j)
    ) INTO o_due;
END
$$;

-- Give a node its lease. Nodes that are gone and hold nothing are forgotten, unless somebody claims for them just now.
CREATE FUNCTION holdfast.renew_1(p_now bigint, p_node text, p_lease bigint, OUT o_now bigint, OUT o_until bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_gone text[];
BEGIN
    o_now := holdfast.time_1(p_now);
    o_until := o_now + p_lease;
    INSERT INTO holdfast.nodes AS n (node, lease_until) VALUES (p_node, o_until)
    ON CONFLICT (node) DO UPDATE SET lease_until = excluded.lease_until;
    v_gone := ARRAY(SELECT n.node FROM holdfast.nodes n 
        WHERE holdfast.lease_end_1(n.lease_until, o_now) <= o_now FOR UPDATE SKIP LOCKED);
    DELETE FROM holdfast.nodes n
    WHERE n.node = ANY (v_gone) AND NOT EXISTS (SELECT 1 FROM holdfast.agenda a WHERE a.owner = n.node);
END
$$;

-- Free these runs of a node, or all of them and its lease.
CREATE FUNCTION holdfast.release_1(
    p_now bigint, p_node text, p_run_ids text[], OUT o_now bigint, OUT o_freed bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_runs bigint[];
BEGIN
    IF p_run_ids IS NULL THEN
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
    IF p_run_ids IS NULL THEN
        DELETE FROM holdfast.nodes WHERE node = p_node;
    END IF;
    o_freed := cardinality(v_runs);
END
$$;

-- Take jobs: longest visible first, then in order of their runs' creation and of step ids.
CREATE FUNCTION holdfast.take_1(
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

-- Keep with a node what is still its to carry out.
CREATE FUNCTION holdfast.beat_1(
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
                AND j.taken_by = p_node AND j.next_attempt = b_attempt[i] + 1;
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
