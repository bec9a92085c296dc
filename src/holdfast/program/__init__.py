"""Programs: definitions that turn outcomes into commands."""
