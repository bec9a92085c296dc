-- oldest reader: 7
-- Indexes by which runs are searched (`store/search.py`). The tenant of those who have none, and what is completed, are
-- left out of them. Those by status have the workflow as well: runs are counted by both.

CREATE INDEX runs_by_status ON holdfast.runs (status, run_no) INCLUDE (plan_id) WHERE status <> 'COMPLETED';
-- A condition that always holds: without it, a plan made while the table was small may look for numbers of runs in here.
CREATE INDEX runs_by_workflow ON holdfast.runs (plan_id, run_no) WHERE plan_id <> '';
CREATE INDEX runs_by_tenant ON holdfast.runs (tenant, run_no) WHERE tenant <> 'default';
CREATE INDEX runs_by_tenant_status ON holdfast.runs (tenant, status, run_no) INCLUDE (plan_id)
    WHERE status <> 'COMPLETED' AND tenant <> 'default';
CREATE INDEX runs_by_tenant_finished ON holdfast.runs (tenant, finished_at, run_no)
    WHERE finished_at IS NOT NULL AND tenant <> 'default';

ALTER TABLE holdfast.run_attributes ADD COLUMN tenant text COLLATE "C" NOT NULL DEFAULT 'default';
UPDATE holdfast.run_attributes a SET tenant = r.tenant FROM holdfast.runs r
    WHERE r.run_no = a.run_no AND r.tenant <> 'default';
CREATE INDEX run_attributes_tenant_number ON holdfast.run_attributes (tenant, name, kind, number, run_no)
    WHERE number IS NOT NULL;
CREATE INDEX run_attributes_tenant_word ON holdfast.run_attributes (tenant, name, kind, word, run_no)
    WHERE word IS NOT NULL;
