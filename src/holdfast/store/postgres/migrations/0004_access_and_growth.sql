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

-- What is kept of it, in one row. A row is forgotten when its transaction had ended half a minute ago.
CREATE TABLE holdfast.growth_kept (
    lost_before  bigint NOT NULL,                         -- of transactions before this one rows may be gone
    ended_before bigint NOT NULL,                         -- those before this one had ended then
    noted_at     bigint NOT NULL
);
INSERT INTO holdfast.growth_kept VALUES (0, 0, 0);
