"""One module for each engine: how it does what `bench/peers/load.py` asks for, in an environment of its own."""
