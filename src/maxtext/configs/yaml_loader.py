"""YAML as configuration files use it."""

import re
from typing import Any

import yaml

MAX_DEPTH, MAX_NODES = 50, 1_000_000  # of YAML from users


SafeLoader: Any = yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader


class YamlLoader(SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that 1e-5 is a number, as everyone expects."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def check_nesting(text: str) -> None:
    """Raise YAMLError for values that are nested too deeply or, with aliases expanded, too large to
    build in memory.
    """
    sizes: dict[str | None, int] = {}  # nodes under each anchor, aliases expanded
    stack: list[tuple[str | None, int]] = []  # of the open collections: anchor, nodes before it
    total = 0

    def refuse(problem: str, event: Any) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    for event in yaml.parse(text, YamlLoader):
        total += 1
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, total))
            if len(stack) > MAX_DEPTH:
                refuse(f"lists and mappings are nested more than {MAX_DEPTH} deep", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = stack.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in stack):
                refuse(f"*{event.anchor} contains itself", event)
            total += sizes.get(event.anchor, 0)
        if total > MAX_NODES:
            refuse(f"there are more than {MAX_NODES:,} values, aliases expanded", event)
