"""Commands for developing Holdfast; nothing here is shipped."""
