"""The event bus: relays that send what the outbox holds, and the targets that they send it to."""
