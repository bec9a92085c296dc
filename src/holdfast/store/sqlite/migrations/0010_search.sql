-- oldest reader: 8
-- Indexes by which runs are searched (`store/search.py`). The tenant of those who have none, and what is completed, are
-- left out of them. Those by status have the workflow as well: runs are counted by both.

CREATE INDEX runs_by_status ON runs (status, run_no, plan_id) WHERE status <> 'COMPLETED';
CREATE INDEX runs_by_workflow ON runs (plan_id, run_no);
CREATE INDEX runs_by_tenant ON runs (tenant, run_no) WHERE tenant <> 'default';
CREATE INDEX runs_by_tenant_status ON runs (tenant, status, run_no, plan_id)
    WHERE status <> 'COMPLETED' AND tenant <> 'default';
CREATE INDEX runs_by_tenant_finished ON runs (tenant, finished_at, run_no)
    WHERE finished_at IS NOT NULL AND tenant <> 'default';

-- The rows of run_attributes once more, by tenant. Triggers write them, so that every commit does, also that of a node
-- which does not know of this table.
CREATE TABLE tenant_attributes (
    tenant TEXT NOT NULL,
    name   TEXT NOT NULL,
    kind   TEXT NOT NULL,
    value  NOT NULL,                               -- REAL or TEXT
    run_no INTEGER NOT NULL,
    PRIMARY KEY (tenant, name, kind, value, run_no)
) WITHOUT ROWID;

CREATE TRIGGER run_attributes_come AFTER INSERT ON run_attributes
BEGIN
    INSERT OR IGNORE INTO tenant_attributes
        SELECT tenant, NEW.name, NEW.kind, coalesce(NEW.number, NEW.word), NEW.run_no FROM runs WHERE run_no = NEW.run_no;
END;
CREATE TRIGGER run_attributes_leave AFTER DELETE ON run_attributes
BEGIN
    DELETE FROM tenant_attributes
        WHERE tenant = (SELECT tenant FROM runs WHERE run_no = OLD.run_no) AND name = OLD.name AND kind = OLD.kind
            AND value = coalesce(OLD.number, OLD.word) AND run_no = OLD.run_no;
END;
INSERT OR IGNORE INTO tenant_attributes
    SELECT tenant, name, kind, coalesce(number, word), run_no FROM run_attributes JOIN runs USING (run_no);
