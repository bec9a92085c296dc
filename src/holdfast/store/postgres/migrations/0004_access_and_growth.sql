-- oldest reader: 1
-- Who may call a service, and which histories have grown.

-- Tokens, by what is known of them. What people wrote may hold a NUL, which text may not.
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

-- Which runs' histories each transaction has made longer: one row for all turns that were committed together, whoever
-- wrote them, of whatever version. Transactions become visible in another order than they are numbered in, so who reads
-- this keeps a snapshot: all before a number, but for those that were under way.
CREATE TABLE holdfast.growth (
    xid        bigint NOT NULL,
    runs       bigint[] NOT NULL,                         -- run_no of each new event
    with_tasks bigint[]                                   -- of those that are about tasks
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX growth_xid ON holdfast.growth (xid);

CREATE FUNCTION holdfast.note_growth_1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO holdfast.growth (xid, runs, with_tasks)
    SELECT pg_current_xact_id()::text::bigint, array_agg(run_no),
        array_agg(run_no) FILTER (WHERE starts_with(event_type, 'Task'))
    FROM grown HAVING count(*) > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER events_growth AFTER INSERT ON holdfast.events REFERENCING NEW TABLE AS grown
    FOR EACH STATEMENT EXECUTE FUNCTION holdfast.note_growth_1();

-- What is kept of it, in one row. A row is forgotten when its transaction had ended half a minute ago.
CREATE TABLE holdfast.growth_kept (
    lost_before  bigint NOT NULL,                         -- of transactions before this one rows may be gone
    ended_before bigint NOT NULL,                         -- those before this one had ended then
    noted_at     bigint NOT NULL
);
INSERT INTO holdfast.growth_kept VALUES (0, 0, 0);

-- Transactions are numbered from the beginning again in a server that was filled from a dump; then all is forgotten.
CREATE FUNCTION holdfast.forget_growth_1(p_now bigint) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_lost bigint;
    v_ended bigint;
    v_forgotten bigint;
    v_snapshot pg_snapshot := pg_current_snapshot();
BEGIN
    SELECT k.lost_before, k.ended_before INTO v_lost, v_ended FROM holdfast.growth_kept k
    WHERE k.noted_at NOT BETWEEN p_now - 30000000 AND p_now FOR UPDATE SKIP LOCKED;
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
