-- oldest reader: 1
-- The gates of workflows with limits: who waits to be let in, and who is inside. What 0002 says of functions holds.
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

-- --- leaving, with the commit ----------------------------------------------------------------------------------------

-- A run that waits has messages that are due at no time, 2^62: it is not ready for them.
CREATE FUNCTION holdfast.leave_1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.finished_at IS NOT NULL AND OLD.finished_at IS NULL THEN
        INSERT INTO holdfast.gate_exits (plan_id, number) VALUES (OLD.plan_id, OLD.gate_no);
        NEW.queued_at := NULL;
    END IF;
    NEW.ready_at := nullif(NEW.ready_at, 4611686018427387904);
    RETURN NEW;
END
$$;
CREATE TRIGGER runs_leave BEFORE UPDATE OF finished_at ON holdfast.runs
    FOR EACH ROW WHEN (OLD.gate_no IS NOT NULL) EXECUTE FUNCTION holdfast.leave_1();

-- --- what is done under the lock of a gate ----------------------------------------------------------------------------

-- Count runs of a tenant and key in or out, and note who of them is first in line.
CREATE FUNCTION holdfast.count_1(p_plan text, p_tenant text, p_key text, p_inside int, p_waiting int)
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

-- Count out those who have left since somebody last looked.
CREATE FUNCTION holdfast.count_out_1(p_plan text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_tenants text[];
    v_keys text[];
    v_inside int[];
BEGIN
    WITH exits AS (
        DELETE FROM holdfast.gate_exits WHERE plan_id = p_plan RETURNING number
    ), gone AS (
        DELETE FROM holdfast.gate_runs WHERE number = ANY (ARRAY(SELECT e.number FROM exits e))
        RETURNING tenant, key, is_inside
    )
    SELECT array_agg(tenant), array_agg(key), array_agg(is_inside::int) INTO v_tenants, v_keys, v_inside FROM gone;
    FOR i IN 1..coalesce(cardinality(v_inside), 0) LOOP
        PERFORM holdfast.count_1(p_plan, v_tenants[i], v_keys[i], -v_inside[i], v_inside[i] - 1);
    END LOOP;
END
$$;

-- Lock gates, make those that are not there yet, and count out who has left.
CREATE FUNCTION holdfast.lock_gates_1(p_plans text[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_plan text;
BEGIN
    FOR v_plan IN SELECT DISTINCT p.plan_id COLLATE "C" FROM unnest(p_plans) AS p (plan_id) ORDER BY 1 LOOP
        INSERT INTO holdfast.gates (plan_id) VALUES (v_plan) ON CONFLICT DO NOTHING;
        PERFORM 1 FROM holdfast.gates WHERE plan_id = v_plan FOR UPDATE;
        PERFORM holdfast.count_out_1(v_plan);
    END LOOP;
END
$$;

-- Let the lines of a gate be open by this limit, if it was another one.
CREATE FUNCTION holdfast.use_limit_1(p_plan text, p_per_key bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    p_per_key := coalesce(p_per_key, 4611686018427387904);
    UPDATE holdfast.gates SET per_key = p_per_key WHERE plan_id = p_plan AND per_key <> p_per_key;
    IF FOUND THEN
        UPDATE holdfast.gate_lines SET per_key = p_per_key WHERE plan_id = p_plan;
    END IF;
END
$$;

-- The first instant, from now on, at which the rate allows another start; the same as core.gates.free_slot.
CREATE FUNCTION holdfast.free_at_1(p_plan text, p_starts bigint, p_period bigint, p_now bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN p_starts IS NULL THEN p_now ELSE greatest(p_now, (
        SELECT s.starts_at + p_period FROM holdfast.gate_starts s
        WHERE s.plan_id = p_plan
            AND s.number = (SELECT g.last_start FROM holdfast.gates g WHERE g.plan_id = p_plan) - p_starts + 1
    )) END;
END
$$;

-- Take an instant of the rate, if there is a rate, and forget those that no longer matter for it.
CREATE FUNCTION holdfast.note_start_1(p_plan text, p_starts bigint, p_at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_last bigint;
BEGIN
    IF p_starts IS NOT NULL THEN
        UPDATE holdfast.gates SET last_start = last_start + 1 WHERE plan_id = p_plan RETURNING last_start INTO v_last;
        INSERT INTO holdfast.gate_starts (plan_id, number, starts_at) VALUES (p_plan, v_last, p_at);
        DELETE FROM holdfast.gate_starts WHERE plan_id = p_plan AND number <= v_last - p_starts;
    END IF;
END
$$;

-- Who is next, if one has room but for the rate: of the tenant after the one that was last, and round again.
CREATE FUNCTION holdfast.next_in_1(p_plan text, p_at_once bigint) RETURNS bigint LANGUAGE plpgsql AS $$
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

-- Let in up to so many at one gate, as far as the gate is concerned, and say when to ask again although nobody leaves.
-- Without `p_new` their runs are not looked at: the caller locks and opens them all. With it, it holds who has come by
-- this call; anybody else's run is locked here, and stays in line if that would mean to wait for it.
CREATE FUNCTION holdfast.let_in_1(
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
        v_number := holdfast.next_in_1(p_plan, p_at_once);
        EXIT WHEN v_number IS NULL;
        v_free := holdfast.free_at_1(p_plan, p_starts, p_period, p_now);
        IF v_free > p_now OR cardinality(o_numbers) >= p_most THEN
            o_again := v_free;
            RETURN;
        END IF;
        IF p_new IS NOT NULL AND array_position(p_new, v_number) IS NULL THEN
            SELECT r.finished_at IS NOT NULL INTO v_is_finished
            FROM holdfast.gate_runs g JOIN holdfast.runs r ON r.run_id = g.run_id
            WHERE g.number = v_number AND r.gate_no = v_number FOR UPDATE OF r SKIP LOCKED;
            EXIT WHEN NOT FOUND;
            IF v_is_finished THEN  -- since those who have left were counted out
                INSERT INTO holdfast.gate_exits (plan_id, number) VALUES (p_plan, v_number) ON CONFLICT DO NOTHING;
                PERFORM holdfast.count_out_1(p_plan);
                CONTINUE;
            END IF;
        END IF;
        UPDATE holdfast.gate_runs SET is_inside = true WHERE number = v_number;
        PERFORM holdfast.count_1(p_plan, g.tenant, g.key, 1, -1) FROM holdfast.gate_runs g WHERE g.number = v_number;
        PERFORM holdfast.note_start_1(p_plan, p_starts, p_now);
        o_numbers := o_numbers || v_number;
    END LOOP;
END
$$;

-- Let the messages come that were held back while runs waited. The locks of the runs are held.
CREATE FUNCTION holdfast.open_1(p_runs bigint[], p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE holdfast.messages SET due_at = p_now WHERE run_no = ANY (p_runs) AND due_at = 4611686018427387904;
    UPDATE holdfast.runs SET queued_at = NULL, ready_at = least(ready_at, p_now) WHERE run_no = ANY (p_runs);
END
$$;

-- --- create -----------------------------------------------------------------------------------------------------------

-- Bring new runs to their gates, one after the other, before they are created. For each: when its messages are due
-- (2^62: it waits; NULL: it is there already), its place, and whether it starts now. `o_others` were let in besides.
-- A run with the policy `reject` comes alone: if it is refused, `o_free` says until when the rate forbids it.
CREATE FUNCTION holdfast.come_1(
    p_now bigint, r_id text[], r_key bytea[], r_plan text[], r_tenant text[],
    t_key text[], t_ahead bigint[], t_at_once bigint[], t_per_key bigint[], t_starts bigint[], t_period bigint[],
    t_overload text[],
    OUT o_dues bigint[], OUT o_numbers bigint[], OUT o_starts boolean[], OUT o_others bigint[], OUT o_free bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_free bigint;
    v_let_in bigint[];
BEGIN
    o_dues := array_fill(NULL::bigint, ARRAY[cardinality(r_id)]);
    o_numbers := o_dues;
    o_starts := array_fill(false, ARRAY[cardinality(r_id)]);
    o_others := '{}';
    FOR i IN 1..cardinality(r_id) LOOP
        CONTINUE WHEN EXISTS (SELECT 1 FROM holdfast.runs WHERE request_key = r_key[i])
            OR EXISTS (SELECT 1 FROM holdfast.runs WHERE run_id = r_id[i]);
        PERFORM holdfast.use_limit_1(r_plan[i], t_per_key[i]);
        v_free := holdfast.free_at_1(r_plan[i], t_starts[i], t_period[i], p_now);
        IF t_overload[i] = 'delay' THEN
            PERFORM holdfast.note_start_1(r_plan[i], t_starts[i], v_free);
            o_dues[i] := v_free;
            o_starts[i] := v_free <= p_now;
            CONTINUE;
        END IF;
        IF t_overload[i] = 'reject' AND (v_free > p_now OR holdfast.next_in_1(r_plan[i], t_at_once[i]) IS NOT NULL
            OR EXISTS (SELECT 1 FROM holdfast.gates WHERE plan_id = r_plan[i] AND inside >= t_at_once[i])
            OR EXISTS (SELECT 1 FROM holdfast.gate_lines WHERE plan_id = r_plan[i] AND tenant = r_tenant[i]
                AND key = t_key[i] AND inside >= t_per_key[i])) THEN
            o_free := v_free;
            RETURN;
        END IF;
        o_numbers[i] := nextval('holdfast.gate_numbers');
        INSERT INTO holdfast.gate_runs (number, plan_id, tenant, key, run_id, place)
        VALUES (o_numbers[i], r_plan[i], r_tenant[i], t_key[i], r_id[i], p_now - t_ahead[i]);
        PERFORM holdfast.count_1(r_plan[i], r_tenant[i], t_key[i], 0, 1);
        SELECT l.o_numbers INTO v_let_in
        FROM holdfast.let_in_1(r_plan[i], t_at_once[i], t_starts[i], t_period[i], 1, p_now, o_numbers) l;
        o_dues[i] := 4611686018427387904;
        o_starts[i] := o_numbers[i] = ANY (v_let_in);
        CONTINUE WHEN v_let_in = '{}';
        IF array_position(o_numbers, v_let_in[1]) IS NULL THEN
            o_others := o_others || v_let_in;
        ELSE
            o_dues[array_position(o_numbers, v_let_in[1])] := p_now;
        END IF;
    END LOOP;
END
$$;

-- Create runs that all have tickets. Arguments and answers are those of create_1, and the tickets, the epoch of what
-- is the owner's, and the instant that goes with O: refused at its gate, and nothing was created.
CREATE FUNCTION holdfast.create_gated_1(
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
    v_come record;
    v_codes text[];
    v_run_ids text[];
    v_inputs bytea[];
    v_runs bigint[];
    v_others bigint[];
BEGIN
    PERFORM holdfast.lock_gates_1(r_plan);
    v_now := holdfast.time_1(p_now);
    PERFORM 1 FROM holdfast.nodes WHERE node = p_owner AND holdfast.lease_end_1(lease_until, v_now) > v_now FOR KEY SHARE;
    IF p_owner IS NOT NULL AND NOT FOUND THEN
        RETURN QUERY SELECT v_now, 0::bigint, 'X', NULL::text, NULL::bytea, 0::bigint, NULL::bigint;
        RETURN;
    END IF;
    SELECT * INTO v_come FROM holdfast.come_1(v_now, r_id, r_key, r_plan, r_tenant, t_key, t_ahead, t_at_once,
        t_per_key, t_starts, t_period, t_overload);
    IF v_come.o_free IS NOT NULL THEN
        RETURN QUERY SELECT v_now, 1::bigint, 'O', r_id[1], NULL::bytea, 0::bigint, v_come.o_free;
        RETURN;
    END IF;
    r_due := ARRAY(
        SELECT CASE
            WHEN t.number IS NOT NULL OR t.due IS NOT NULL OR t.is_due THEN nullif(t.starts_at, 4611686018427387904)
        END
        FROM unnest(v_come.o_dues, v_come.o_numbers, r_due, r_is_due)
            WITH ORDINALITY AS t (starts_at, number, due, is_due, ord) ORDER BY t.ord
    );
    m_due := ARRAY(SELECT v_come.o_dues[m.run] FROM unnest(m_run) WITH ORDINALITY AS m (run, ord) ORDER BY m.ord);
    SELECT array_agg(c.o_code ORDER BY c.o_ord), array_agg(c.o_run_id ORDER BY c.o_ord),
        array_agg(c.o_input ORDER BY c.o_ord)
    INTO v_codes, v_run_ids, v_inputs
    FROM holdfast.create_1(v_now, NULL, r_id, r_tenant, r_project, r_environment, r_plan, r_plan_version, r_request,
        r_key, r_input, r_parent, r_reference, r_tags, r_status, r_events, r_snapshot, r_due,
        array_fill(false, ARRAY[cardinality(r_id)]), e_run, e_seq, e_id, e_type, e_step, e_engine, e_logical, e_data,
        e_key, e_emitted, e_adapter, e_ref, e_cause, e_parent, e_schema, m_run, m_signal, m_due, m_message, p_more) c;
    IF EXISTS (
        SELECT 1 FROM unnest(v_codes, v_come.o_dues) AS t (code, due) WHERE (t.code = 'C') <> (t.due IS NOT NULL)
    ) THEN  -- a run of this name came or went meanwhile, past the gate
        RAISE EXCEPTION 'who was created is not who came to the gate' USING ERRCODE = 'serialization_failure';
    END IF;

    WITH changed AS (
        UPDATE holdfast.runs r
        SET gate_no = t.number, queued_at = CASE WHEN t.due = 4611686018427387904 THEN v_now END,
            lease_owner = CASE WHEN t.starts THEN p_owner END,
            lease_epoch = CASE WHEN t.starts AND p_owner IS NOT NULL THEN 1 ELSE 0 END
        FROM unnest(r_id, v_come.o_dues, v_come.o_numbers, v_come.o_starts) AS t (run_id, due, number, starts)
        WHERE r.run_id = t.run_id AND (t.number IS NOT NULL OR t.starts)
        RETURNING r.run_no, r.lease_owner
    )
    SELECT array_agg(run_no) INTO v_runs FROM changed WHERE lease_owner IS NOT NULL;
    IF v_come.o_others <> '{}' THEN
        v_others := ARRAY(SELECT p.run_no FROM holdfast.places_1(v_come.o_others) p);
        PERFORM holdfast.open_1(v_others, v_now);
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

-- --- admit ------------------------------------------------------------------------------------------------------------

-- The runs that have these places, in their order, and whether they are free; without those that have finished.
CREATE FUNCTION holdfast.places_1(p_numbers bigint[]) RETURNS TABLE (run_no bigint, is_free boolean)
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

-- Let in runs at the gates of these plans, which are in order of their names. The code is X if the node's lease is not
-- current: if it was when this began, runs may have been let in, and are free. `o_free` says who was free before.
CREATE FUNCTION holdfast.admit_1(
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
    -- Where nobody waits and nobody has left, nobody who waits soon will have missed anything.
    v_plans := ARRAY(
        SELECT g.plan_id FROM holdfast.gates g WHERE g.plan_id = ANY (l_plan) AND (
            g.waiting > 0 OR (SELECT true FROM holdfast.gate_exits e WHERE e.plan_id = g.plan_id LIMIT 1))
    );
    IF o_code IS NOT NULL OR v_plans = '{}' THEN
        RETURN;
    END IF;
    PERFORM holdfast.lock_gates_1(v_plans);
    o_now := holdfast.time_1(p_now);
    FOR i IN 1..cardinality(l_plan) LOOP
        CONTINUE WHEN NOT l_plan[i] = ANY (v_plans);
        PERFORM holdfast.use_limit_1(l_plan[i], l_per_key[i]);
        SELECT * INTO v_one FROM holdfast.let_in_1(l_plan[i], l_at_once[i], l_starts[i], l_period[i],
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
    SELECT array_agg(p.run_no), array_agg(p.is_free) INTO o_runs, o_free FROM holdfast.places_1(v_numbers) p;
    IF cardinality(o_runs) IS DISTINCT FROM cardinality(v_numbers) THEN  -- one has finished meanwhile: there is room
        o_again := o_now;
    END IF;
    PERFORM holdfast.open_1(o_runs, o_now);
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

-- As loaded_1, and since when each waits at its gate.
CREATE FUNCTION holdfast.loaded_2(p_runs bigint[], p_now bigint)
RETURNS TABLE (
    run_no bigint, run_id text, tenant text, project text, environment text, plan_id text, plan_version text,
    run_request_id text, parent_run_id text, reference_key text, tags text, status text, version bigint,
    snapshot text, created_at bigint, updated_at bigint, finished_at bigint, inbox_seq bigint, ready_at bigint,
    lease_owner text, lease_epoch bigint, queued_at bigint, o_now bigint, messages text[], s_seq bigint[],
    s_name text[], s_signal text[], s_step text[], s_at bigint[], s_payload text[], records text[], d_step text[],
    d_details text[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY
    SELECT r.run_no, r.run_id, r.tenant, r.project, r.environment, r.plan_id, r.plan_version, r.run_request_id,
        r.parent_run_id, r.reference_key, r.tags, r.status, r.version, r.snapshot, r.created_at, r.updated_at,
        r.finished_at, r.inbox_seq, r.ready_at, r.lease_owner, r.lease_epoch, r.queued_at, p_now,
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
