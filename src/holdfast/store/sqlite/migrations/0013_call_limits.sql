-- oldest reader: 8
-- Limits on activities: `core/call_limits.py`. Calls that have one stand in queues of their own, with the limit's name and
-- the key in their options. Other jobs have NULL here, and are in none of these indexes.

ALTER TABLE jobs ADD COLUMN limit_name TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job) THEN json_extract(job, '$.options.limit.name') END
) VIRTUAL;
ALTER TABLE jobs ADD COLUMN limit_tenant TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job) THEN json_extract(job, '$.tenant') END
) VIRTUAL;
ALTER TABLE jobs ADD COLUMN limit_key TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job)
    THEN coalesce(json_extract(job, '$.options.limit.key'), '') END
) VIRTUAL;
-- The lines of each limit, and in each line its calls in order.
CREATE INDEX jobs_lines ON jobs
    (limit_name, limit_tenant, limit_key, visible_at, run_no, step_id, queue, activity, taken_by)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL;
CREATE INDEX jobs_places ON jobs (limit_name, visible_at)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL AND taken_by IS NOT NULL;

-- Whose turn it is: of the tenants of a limit (tenant ''), and of the keys of each tenant, the one that was served last.
CREATE TABLE limit_turns (
    name   TEXT NOT NULL,
    tenant TEXT NOT NULL,
    last   TEXT NOT NULL,
    PRIMARY KEY (name, tenant)
) WITHOUT ROWID;
-- The attempts that have begun within the last period of a limit that has a rate.
CREATE TABLE limit_begins (
    name     TEXT NOT NULL,
    begun_at INTEGER NOT NULL,
    number   INTEGER NOT NULL,
    tenant   TEXT NOT NULL,
    key      TEXT NOT NULL,
    PRIMARY KEY (name, begun_at, number)
) WITHOUT ROWID;
CREATE INDEX limit_begins_of_key ON limit_begins (name, tenant, key, begun_at);
