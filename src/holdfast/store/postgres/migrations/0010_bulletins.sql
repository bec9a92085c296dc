-- oldest reader: 7
-- What processes leave for each other and for operators, outside of all runs: samples, takeovers, queries and answers.

CREATE TABLE holdfast.bulletins (
    kind        text COLLATE "C" NOT NULL,
    bulletin_id text COLLATE "C" NOT NULL,
    at          bigint NOT NULL,
    expires_at  bigint NOT NULL,
    body        text NOT NULL,                            -- JSON, of its kind
    PRIMARY KEY (kind, bulletin_id)
);
CREATE INDEX bulletins_by_time ON holdfast.bulletins (kind, at, bulletin_id);
CREATE INDEX bulletins_by_end ON holdfast.bulletins (expires_at);
