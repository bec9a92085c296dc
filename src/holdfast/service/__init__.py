"""The service: one catalogue of operations, and the transports that are derived from it.

`operations/` says what can be asked, each operation once, typed and without a transport. `rest` and `jsonrpc` derive
theirs from it, `openapi` describes it, `problems` says how refusals look, and `server` puts it behind a socket.
"""
