"""Names of types that several rooms share. It imports nothing, for commands that start fast."""

from typing import Any

Json = dict[str, Any]  # an object of a JSON or YAML file: its values are of any type until checked
Tree = Any  # what JAX calls a pytree: nested dicts of arrays, shapes or shardings, or one of them
