"""Who may call: tokens, roles, sessions, and limits on callers."""
