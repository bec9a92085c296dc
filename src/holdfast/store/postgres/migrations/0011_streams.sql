-- oldest reader: 7
-- What runs write for readers outside, while they work: chunks in segments, numbered within their stream.

CREATE TABLE holdfast.streams (
    run_no    bigint NOT NULL,
    name      text COLLATE "C" NOT NULL,
    last_seq  bigint NOT NULL,
    size      bigint NOT NULL,                            -- of the bodies, in bytes
    dropped   bigint NOT NULL,                            -- chunks that it had no room for
    is_closed boolean NOT NULL,
    PRIMARY KEY (run_no, name)
);
CREATE TABLE holdfast.stream_writers (                    -- the last attempt of each step that wrote
    run_no    bigint NOT NULL,
    name      text COLLATE "C" NOT NULL,
    step_id   text COLLATE "C" NOT NULL,
    attempt   bigint NOT NULL,
    epoch     bigint NOT NULL,
    first_seq bigint NOT NULL,
    count     bigint NOT NULL,
    PRIMARY KEY (run_no, name, step_id)
);
CREATE TABLE holdfast.stream_segments (
    run_no         bigint NOT NULL,
    name           text COLLATE "C" NOT NULL,
    first_seq      bigint NOT NULL,
    count          bigint NOT NULL,
    step_id        text COLLATE "C" NOT NULL,             -- empty: the workflow
    attempt        bigint NOT NULL,
    at             bigint NOT NULL,
    restarted_from bigint,
    body           text NOT NULL,                         -- a JSON array of chunks, or that sealed
    PRIMARY KEY (run_no, name, first_seq)
);
