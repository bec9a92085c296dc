"""What is sent to runs: signals, operators' commands, operations on tasks."""
