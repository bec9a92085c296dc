"""Stores: where histories, inboxes and leases are kept. `port` is the contract; the rest implements it."""
