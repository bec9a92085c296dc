"""Access control: tokens, roles, sessions, and limits on callers."""
