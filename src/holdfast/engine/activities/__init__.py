"""How activities are dispatched, executed and reported."""
