"""What Holdfast costs, measured: `python -m bench`."""
