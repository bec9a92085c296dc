-- oldest reader: 1
-- Nodes that have several lives, turns that are counted, and what else an audit asked for.

ALTER TABLE holdfast.nodes ADD COLUMN life text NOT NULL DEFAULT '';   -- which life of the node its lease is of
