"""How runs are started and admitted."""
