"""Reads checkpoints in which parameters have their former names.

Names on disk are never rewritten. When a path component of the model is renamed, it gets an entry
in RENAMED_COMPONENTS, and stored names are matched with the model's by `match_names`: weights and
the optimizer state that belongs to them alike, in training checkpoints and in weight folders.
"""

import re
from collections.abc import Collection, Iterable
from typing import TypeVar

# Former path component -> current path component
RENAMED_COMPONENTS = {"kernel": "weight"}

NameT = TypeVar("NameT", str, tuple[str, ...])  # "a/b/kernel" or ("a", "b", "kernel")


def current_name(name: NameT) -> NameT:
    """Replace every renamed component of a name.

    The last component may have a suffix, as in "kernel.scale" and "kernel[0:4,0:8]".
    """
    if isinstance(name, str):
        return "/".join(map(current_component, name.split("/")))
    return tuple(map(current_component, name))


def current_component(component: str) -> str:
    stem = re.split(r"[.\[]", component, maxsplit=1)[0]
    return RENAMED_COMPONENTS.get(stem, stem) + component[len(stem) :]


def match_names(stored: Iterable[NameT], expected: Collection[NameT]) -> dict[NameT, NameT]:
    """The stored name of every tensor of a checkpoint by its name in the model: {name: stored}.

    A stored name is replaced only if the model expects its current form and not the stored one,
    and if the checkpoint has no tensor of that name already. Other names map to themselves.
    """
    stored = list(stored)
    taken = set(stored)
    names = {}
    for name in stored:
        current = current_name(name)
        renamed = name not in expected and current in expected and current not in taken
        names[current if renamed else name] = name
    return names
