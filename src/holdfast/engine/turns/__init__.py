"""A turn of a run: what it reads, what the program does, and what is committed."""
