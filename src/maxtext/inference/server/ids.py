"""Ids of requests, responses and calls."""

import random
import re

# Seeded by the system once: reading its randomness for each id would release the interpreter, which
# is then the engine's for a while.
GENERATOR = random.Random()
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def new_id() -> str:
    """32 random hexadecimal digits. They identify, and protect nothing."""
    return f"{GENERATOR.getrandbits(128):032x}"


def is_request_id(text: str) -> bool:
    """Whether a client may name its request so."""
    return REQUEST_ID.fullmatch(text) is not None
