"""The same work for Holdfast and for other engines of durable execution, in turns: `make bench-peers`."""
