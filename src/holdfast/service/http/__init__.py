"""The transports: REST, JSON-RPC and the page over HTTP."""
