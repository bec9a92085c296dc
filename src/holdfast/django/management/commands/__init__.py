"""Commands of `manage.py`, one per module, whose name Django uses."""
