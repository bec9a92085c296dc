-- oldest reader: 7
-- Limits on activities: `core/call_limits.py`. Calls that have one stand in queues of their own, with the limit's name and
-- the key in their options. Other jobs have NULL here, and are in none of these indexes. What people wrote may hold a
-- NUL, which JSON functions refuse: none of it is looked at here.

ALTER TABLE holdfast.jobs
    ADD COLUMN limit_name text COLLATE "C" GENERATED ALWAYS AS (
        CASE WHEN starts_with(queue, 'limited:')
        THEN replace(job, '\u0000', '\u0001')::jsonb #>> '{options,limit,name}' END
    ) STORED,
    ADD COLUMN limit_tenant text COLLATE "C" GENERATED ALWAYS AS (
        CASE WHEN starts_with(queue, 'limited:') THEN replace(job, '\u0000', '\u0001')::jsonb ->> 'tenant' END
    ) STORED,
    ADD COLUMN limit_key text COLLATE "C" GENERATED ALWAYS AS (
        CASE WHEN starts_with(queue, 'limited:')
        THEN coalesce(replace(job, '\u0000', '\u0001')::jsonb #>> '{options,limit,key}', '') END
    ) STORED;
-- The lines of each limit, and in each line its calls in order.
CREATE INDEX jobs_lines ON holdfast.jobs (limit_name, limit_tenant, limit_key, visible_at, run_no, step_id)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL;
CREATE INDEX jobs_places ON holdfast.jobs (limit_name, visible_at)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL AND taken_by IS NOT NULL;

-- Whose turn it is: of the tenants of a limit (tenant ''), and of the keys of each tenant, the one that was served last.
-- Who decides which calls of a limit get a place holds the lock of its row for tenant ''.
CREATE TABLE holdfast.limit_turns (
    name   text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    last   text COLLATE "C",
    PRIMARY KEY (name, tenant)
);
-- The attempts that have begun within the last period of a limit that has a rate.
CREATE TABLE holdfast.limit_begins (
    name     text COLLATE "C" NOT NULL,
    begun_at bigint NOT NULL,
    tenant   text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL
);
CREATE INDEX limit_begins_all ON holdfast.limit_begins (name, begun_at);
CREATE INDEX limit_begins_of_key ON holdfast.limit_begins (name, tenant, key, begun_at);
