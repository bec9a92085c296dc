-- oldest reader: 8
-- What processes leave for each other and for operators, outside of all runs: samples, takeovers, queries and answers.

CREATE TABLE bulletins (
    kind        TEXT NOT NULL,
    bulletin_id TEXT NOT NULL,
    at          INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    body        TEXT NOT NULL,                            -- JSON, of its kind
    PRIMARY KEY (kind, bulletin_id)
) WITHOUT ROWID;
CREATE INDEX bulletins_by_time ON bulletins (kind, at, bulletin_id);
CREATE INDEX bulletins_by_end ON bulletins (expires_at);
