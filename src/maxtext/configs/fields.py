"""What a key can hold, read off its type: how text becomes a value, what `none` means, how to
describe a misfit.
"""

import types
import typing
from enum import Enum
from functools import cache
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from maxtext.common.errors import ConfigError
from maxtext.configs.types import Settings
from maxtext.configs.yaml_loader import YamlLoader, check_nesting

KEYS = Settings.model_fields


@cache
def members(key: str) -> tuple[Any, ...]:
    """The members of a key's type: its union's, or itself alone. Constraints are stripped."""
    annotation = KEYS[key].annotation
    parts = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return tuple(
        typing.get_args(part)[0] if typing.get_origin(part) is typing.Annotated else part
        for part in parts
    )


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def admits_none(key: str) -> bool:
    return type(None) in members(key) or Any in members(key)


def admits_text(key: str) -> bool:
    """Whether a bare word is a value of this key: text, and choices that are words."""
    return any(part is str or is_choice(part) for part in members(key))


def is_choice(part: Any) -> bool:
    return typing.get_origin(part) is typing.Literal or (
        isinstance(part, type) and issubclass(part, str | Enum) and part is not str
    )


def choices(key: str) -> list[str]:
    """The values of a key with a fixed set of them."""
    found: list[str] = []
    for part in members(key):
        if typing.get_origin(part) is typing.Literal:
            found += [str(value) for value in typing.get_args(part)]
        elif isinstance(part, type) and issubclass(part, Enum):
            found += [str(member.value) for member in part]
    return found


def is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def from_text(key: str, text: str) -> Any:
    """A word of the command line or environment as a value: text stays text, all else is read as
    YAML.
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


def normalise(key: str, value: Any) -> Any:
    """`none` clears a key: None where the type has it, else the empty text."""
    if is_none(value):
        if admits_none(key):
            return None
        return "" if admits_text(key) else value
    return value


def fits(key: str, value: Any) -> bool:
    """Refuses true/false for a number, which Python would take as 1 and 0."""
    return not isinstance(value, bool) or bool in members(key) or Any in members(key)


def describe(key: str) -> str:
    """A key's type in words."""
    words = []
    for part in members(key):
        if part is type(None):
            continue
        if is_choice(part):
            words.append("one of " + ", ".join(value or "(empty)" for value in choices(key)))
        else:
            words.append(PLAIN.get(part) or PLAIN.get(typing.get_origin(part)) or str(part))
            inner = [PLAIN_PLURAL[item] for item in typing.get_args(part) if item in PLAIN_PLURAL]
            if inner and typing.get_origin(part) is list:
                words[-1] += f" of {inner[0]}"
    text = " or ".join(words)
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


def is_true(value: Any) -> bool:
    """Whether a switch that is read before validation is on."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))


def same(key: str, one: Any, other: Any) -> bool:
    """Whether two unchecked values of a key mean the same, e.g. 1e-5 and "1e-05"."""
    return typed(key, one) == typed(key, other)


def is_valid(key: str, value: Any) -> bool:
    """Whether a value has its key's type."""
    if not fits(key, value):
        return False
    try:
        adapter(key).validate_python(normalise(key, value))
    except ValidationError:
        return False
    return True


def typed(key: str, value: Any) -> Any:
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
