"""Commands of `manage.py`, one a module: Django finds them by its name."""
