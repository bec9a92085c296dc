-- oldest reader: 8
-- What runs write for readers outside, while they work: chunks in segments, numbered within their stream.

CREATE TABLE streams (
    run_no    INTEGER NOT NULL,
    name      TEXT NOT NULL,
    last_seq  INTEGER NOT NULL,
    size      INTEGER NOT NULL,                           -- of the bodies, in bytes
    dropped   INTEGER NOT NULL,                           -- chunks that it had no room for
    is_closed INTEGER NOT NULL,
    PRIMARY KEY (run_no, name)
) WITHOUT ROWID;
CREATE TABLE stream_writers (                             -- the last attempt of each step that wrote
    run_no    INTEGER NOT NULL,
    name      TEXT NOT NULL,
    step_id   TEXT NOT NULL,
    attempt   INTEGER NOT NULL,
    epoch     INTEGER NOT NULL,
    first_seq INTEGER NOT NULL,
    count     INTEGER NOT NULL,
    PRIMARY KEY (run_no, name, step_id)
) WITHOUT ROWID;
CREATE TABLE stream_segments (
    run_no         INTEGER NOT NULL,
    name           TEXT NOT NULL,
    first_seq      INTEGER NOT NULL,
    count          INTEGER NOT NULL,
    step_id        TEXT NOT NULL,                         -- empty: the workflow
    attempt        INTEGER NOT NULL,
    at             INTEGER NOT NULL,
    restarted_from INTEGER,
    body           TEXT NOT NULL,                         -- a JSON array of chunks, or that sealed
    PRIMARY KEY (run_no, name, first_seq)
);
CREATE TRIGGER streams_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM streams WHERE run_no = OLD.run_no;
    DELETE FROM stream_writers WHERE run_no = OLD.run_no;
    DELETE FROM stream_segments WHERE run_no = OLD.run_no;
END;
