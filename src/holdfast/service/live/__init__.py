"""What changes, as it changes: the change feed, subscriptions and event streams."""
