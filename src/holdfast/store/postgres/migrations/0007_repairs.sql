-- oldest reader: 1
-- Nodes that have several lives, turns that are counted, and what else an audit asked for.

ALTER TABLE holdfast.runs ADD COLUMN losses bigint NOT NULL DEFAULT 0;   -- nodes that went away with it since its last turn
ALTER TABLE holdfast.nodes ADD COLUMN life text NOT NULL DEFAULT '';   -- which life of the node its lease is of

-- By name: of a large mailbox only what open waits can take is read.
DROP INDEX holdfast.signals_unconsumed;
CREATE INDEX signals_unconsumed ON holdfast.signals (run_no, name, inbox_seq) WHERE consumed_seq IS NULL;
