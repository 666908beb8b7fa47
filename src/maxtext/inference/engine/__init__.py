"""The engine: which sequences run, their cache, and the programs that compute them."""
