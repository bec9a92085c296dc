-- oldest reader: 1
-- Activities in queues, and what activities have said of their progress.

CREATE TABLE jobs (
    run_no       INTEGER NOT NULL,
    step_id      TEXT NOT NULL,
    queue        TEXT NOT NULL,                    -- '': carried out by the run's owner; there are only details
    activity     TEXT NOT NULL,
    visible_at   INTEGER,                          -- when it may be taken; NULL: never
    taken_by     TEXT,                             -- node of the last take
    next_attempt INTEGER NOT NULL,                 -- engine_attempt_id of the next take
    details      TEXT,                             -- JSON
    job          TEXT,                             -- JSON Job
    PRIMARY KEY (run_no, step_id)
) WITHOUT ROWID;
-- In the order in which jobs are taken. The activity is there so that jobs which a taker does not know cost little.
CREATE INDEX jobs_visible ON jobs (queue, visible_at, run_no, step_id, activity) WHERE visible_at IS NOT NULL;

-- A trigger, because a run's number may be used again, and older nodes that share the file do not know of jobs.
-- One for the end of runs would cost every turn a fifth of its time; `take` looks for what older nodes left instead.
CREATE TRIGGER jobs_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM jobs WHERE run_no = OLD.run_no;
END;
