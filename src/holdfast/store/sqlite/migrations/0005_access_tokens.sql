-- oldest reader: 1
-- Who may call a service: tokens, by what is known of them. Older nodes that share the file do not look here.

CREATE TABLE access_tokens (
    token_id     TEXT NOT NULL PRIMARY KEY,
    tenant       TEXT,                             -- NULL: for all tenants
    session_of   TEXT,                             -- NULL: no session
    expires_at   INTEGER,
    revoked_at   INTEGER,
    revoked_by   TEXT NOT NULL DEFAULT '',
    last_used_at INTEGER,
    token        TEXT NOT NULL                     -- JSON AccessToken, as it was made
) WITHOUT ROWID;
CREATE INDEX access_tokens_sessions ON access_tokens (expires_at) WHERE session_of IS NOT NULL;
