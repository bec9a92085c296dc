"""Messages to runs: signals, operators' commands, operations on tasks."""
