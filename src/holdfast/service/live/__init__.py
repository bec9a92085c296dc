"""Live updates: the change feed, subscriptions and event streams."""
