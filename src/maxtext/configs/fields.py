"""The values that a key accepts, by its type: parsing text, the meaning of `none`, descriptions of
the type for messages.

Also the YAML loader of configuration files.
"""

import re
import types
import typing
from enum import Enum
from functools import cache
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from maxtext.common.errors import ConfigError
from maxtext.configs.types import Settings

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


KEYS = Settings.model_fields


@cache
def members(key: str) -> tuple[Any, ...]:
    """The members of a key's union type, or the type itself. Constraints are stripped."""
    annotation = KEYS[key].annotation
    parts = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return tuple(
        typing.get_args(part)[0] if typing.get_origin(part) is typing.Annotated else part
        for part in parts
    )


def is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def admits_none(key: str) -> bool:
    return type(None) in members(key) or Any in members(key)


def admits_text(key: str) -> bool:
    """Whether the key accepts a bare string: text, or a choice that is a string."""
    return any(part is str or is_choice(part) for part in members(key))


def is_choice(part: object) -> bool:
    return typing.get_origin(part) is typing.Literal or (
        isinstance(part, type) and issubclass(part, str | Enum) and part is not str
    )


def choices(key: str) -> list[str]:
    """The accepted values of a key that has a fixed set of them."""
    names: list[str] = []
    for part in members(key):
        if typing.get_origin(part) is typing.Literal:
            names += [str(value) for value in typing.get_args(part)]
        elif isinstance(part, type) and issubclass(part, Enum):
            names += [str(member.value) for member in part]
    return names


def is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def from_text(key: str, text: str) -> object:
    """Parse the value of a key from the command line or environment: YAML, unless the key accepts
    text.
    """
    if key not in KEYS:
        return text
    if admits_text(key) and not (text.startswith(("[", "{")) and len(members(key)) > 1):
        return text
    try:
        check_nesting(text)
        return yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. a date without such a day
        shown = text if len(text) <= 60 else f"{text[:40]}…"
        raise ConfigError(
            f"{key}={shown}: not a valid value: {getattr(error, 'problem', error)}"
        ) from error


def normalise(key: str, value: object) -> object:
    """`none` clears a key, unless it is one of its choices: None where the type has it, else the
    empty text."""
    if is_none(value) and value not in choices(key):
        if admits_none(key):
            return None
        return "" if admits_text(key) else value
    return value


def fits(key: str, value: object) -> bool:
    """Whether a value may be validated. False for true/false where a number is expected, since
    Python would accept them as 1 and 0.
    """
    return not isinstance(value, bool) or bool in members(key) or Any in members(key)


def describe(key: str) -> str:
    """A key's type, described for a message."""
    kinds = []
    for part in members(key):
        if part is type(None):
            continue
        if is_choice(part):
            kinds.append("one of " + ", ".join(value or "(empty)" for value in choices(key)))
        else:
            kinds.append(PLAIN.get(part) or PLAIN.get(typing.get_origin(part)) or str(part))
            inner = [PLAIN_PLURAL[item] for item in typing.get_args(part) if item in PLAIN_PLURAL]
            if inner and typing.get_origin(part) is list:
                kinds[-1] += f" of {inner[0]}"
    text = " or ".join(kinds)
    for bound in KEYS[key].metadata:
        text += (
            f" >= {bound.ge}"
            if hasattr(bound, "ge")
            else f" > {bound.gt}"
            if hasattr(bound, "gt")
            else ""
        )
    return f"{text}, or none" if admits_none(key) and Any not in members(key) else text


PLAIN = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
    Any: "anything",
}
PLAIN_PLURAL = {int: "whole numbers", str: "text", float: "numbers"}


def is_true(value: object) -> bool:
    """Whether a boolean that is read before validation is true."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))


def is_same(key: str, a: object, b: object) -> bool:
    """Whether two values of a key are equal after validation, e.g. 1e-5 and "1e-05"."""
    return validated(key, a) == validated(key, b)


def is_valid(key: str, value: object) -> bool:
    """Whether a value has its key's type."""
    if not fits(key, value):
        return False
    try:
        adapter(key).validate_python(normalise(key, value))
    except ValidationError:
        return False
    return True


def validated(key: str, value: object) -> object:
    """The value as its key's type, or unchanged if it does not fit."""
    try:
        return adapter(key).validate_python(normalise(key, value))
    except ValidationError:
        return value


@cache
def adapter(key: str) -> TypeAdapter:
    field = KEYS[key]
    annotation: Any = field.annotation
    return TypeAdapter(
        typing.Annotated[annotation, *field.metadata] if field.metadata else annotation
    )
