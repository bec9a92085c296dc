-- oldest reader: 1
-- Messages that nobody could handle, kept until somebody has looked and their run is purged.

CREATE TABLE dead_letters (
    letter_id  TEXT NOT NULL PRIMARY KEY,
    run_no     INTEGER NOT NULL,
    reason     TEXT NOT NULL,
    detail     TEXT NOT NULL,
    node       TEXT NOT NULL,
    died_at    INTEGER NOT NULL,
    settled    TEXT,                               -- NULL: nobody has looked yet
    settled_by TEXT NOT NULL DEFAULT '',
    settled_at INTEGER,
    envelope   BLOB NOT NULL                       -- JSON Message, or the bytes that were found instead
) WITHOUT ROWID;
CREATE INDEX dead_letters_open ON dead_letters (died_at, letter_id) WHERE settled IS NULL;
CREATE INDEX dead_letters_by_run ON dead_letters (run_no, died_at, letter_id);

-- A trigger, because a run's number may be used again, and older nodes that share the file do not know of letters.
CREATE TRIGGER dead_letters_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM dead_letters WHERE run_no = OLD.run_no;
END;
