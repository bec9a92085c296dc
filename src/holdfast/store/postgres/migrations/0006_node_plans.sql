-- oldest reader: 1
-- Nodes say what they can run, and claim by version. A definition is one text: a plan's id, a line break, and its
-- version; no name has a line break in it.

ALTER TABLE holdfast.nodes ADD COLUMN plans text[];        -- NULL: it has not said, and may have everything
