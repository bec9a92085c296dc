"""What is sent to runs: signals, commands of operators, operations on tasks."""
