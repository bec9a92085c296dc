"""Metrics, logs, traces, and the doctor."""
