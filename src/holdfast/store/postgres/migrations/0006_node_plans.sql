-- oldest reader: 1
-- Nodes say what they can run, and claim by version. A definition is one text: a plan's id, a line break, and its
-- version; no name has a line break in it. What 0002 says of functions holds.

ALTER TABLE holdfast.nodes ADD COLUMN plans text[];        -- NULL: it has not said, and may have everything

-- As eligible_1, by version.
CREATE FUNCTION holdfast.eligible_2(p_now bigint, p_node text, p_limit bigint, p_plans text[], p_from bigint[])
RETURNS TABLE (o_stream int, o_place bigint, o_since bigint, o_run bigint, o_owner text) LANGUAGE plpgsql AS $$
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

-- As claim_1, by version.
CREATE FUNCTION holdfast.claim_2(
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

-- As next_due_1, by version.
CREATE FUNCTION holdfast.next_due_2(
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
        -- The newest places first: there somebody is most likely to be alive.
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

-- As renew_1, and what the node can run; NULL leaves what it has said before.
CREATE FUNCTION holdfast.renew_2(
    p_now bigint, p_node text, p_lease bigint, p_plans text[], OUT o_now bigint, OUT o_until bigint
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_gone text[];
BEGIN
    o_now := holdfast.time_1(p_now);
    o_until := o_now + p_lease;
    INSERT INTO holdfast.nodes AS n (node, lease_until, plans) VALUES (p_node, o_until, p_plans)
    ON CONFLICT (node) DO UPDATE
    SET lease_until = excluded.lease_until, plans = coalesce(excluded.plans, n.plans);
    v_gone := ARRAY(SELECT n.node FROM holdfast.nodes n
        WHERE holdfast.lease_end_1(n.lease_until, o_now) <= o_now FOR UPDATE SKIP LOCKED);
    DELETE FROM holdfast.nodes n
    WHERE n.node = ANY (v_gone) AND NOT EXISTS (SELECT 1 FROM holdfast.agenda a WHERE a.owner = n.node);
END
$$;

-- The definitions that no node alive has, of runs that have been eligible since then. Of each kind of run some thousand
-- are looked at: what nobody takes has waited for longest.
CREATE FUNCTION holdfast.missing_1(p_now bigint, p_late bigint)
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
    WHERE NOT EXISTS (
        SELECT 1 FROM holdfast.nodes n
        WHERE holdfast.lease_end_1(n.lease_until, v_now) > v_now
            AND (n.plans IS NULL OR p.plan_id || E'\n' || p.plan_version = ANY (n.plans))
    )
    ORDER BY p.since, p.plan_id, p.plan_version;
END
$$;
