-- oldest reader: 1
-- Nodes that have several lives, turns that are counted, and what else an audit asked for. Tables that older releases
-- insert into without naming columns (nodes, tasks, jobs, gate_starts, node_plans) get no columns: what is new of
-- them stands in tables beside.

ALTER TABLE runs ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;   -- nodes that went away with it since its last turn
