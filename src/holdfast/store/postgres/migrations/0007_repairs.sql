-- oldest reader: 1
-- Nodes that have several lives, turns that are counted, and what else an audit asked for.

ALTER TABLE holdfast.runs ADD COLUMN losses bigint NOT NULL DEFAULT 0;   -- nodes that went away with it since its last turn
