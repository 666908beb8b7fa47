"""Ids of requests, responses and calls."""

import random

# Seeded by the system once: reading its randomness for each id would release the interpreter, which
# is then the engine's for a while.
GENERATOR = random.Random()


def new_id() -> str:
    """32 random hexadecimal digits. They identify, and protect nothing."""
    return f"{GENERATOR.getrandbits(128):032x}"
