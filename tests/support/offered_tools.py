"""Tools of a request."""

from tests.support.schemas import SCHEMAS

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[index]}}
    for index, name in enumerate(("add_person", "set_tags"))
]
