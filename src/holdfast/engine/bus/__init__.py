"""The event bus: relays that send the entries of the outbox, and the targets that they send to."""
