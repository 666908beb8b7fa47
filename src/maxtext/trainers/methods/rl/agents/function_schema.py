"""The JSON schema of a Python function, from its type hints and its docstring.

A docstring has a description, and in a section `Args:` a line `name: description` for each
argument, which may end in `(choices: ["a", "b"])`. The schemas are those of `get_json_schema` of
transformers, which chat templates expect.
"""

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union

from maxtext.common.errors import ConfigError

Schema = dict[str, Any]
BASIC_TYPES: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SECTION = re.compile(r"^(Args|Returns|Raises):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+):\s*(.*)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.DOTALL | re.IGNORECASE)


def function_schema(function: Callable[..., Any]) -> Schema:
    """{"type": "function", "function": {"name", "description", "parameters"}}. Raises ConfigError
    if the function has no docstring, or an argument no type hint that JSON can express."""
    name = getattr(function, "__name__", type(function).__name__)
    description, arguments, returns = parse_docstring(name, inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    properties: dict[str, Schema] = {}
    required = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the argument {argument} of the tool {name} has no name in a call: tools have "
                "neither *args, **kwargs nor positional arguments"
            )
        if argument not in hints:
            raise ConfigError(f"the argument {argument} of the tool {name} has no type hint")
        schema = dict(type_schema(hints[argument], f"the argument {argument} of the tool {name}"))
        text = arguments.get(argument, "")
        if choices := CHOICES.search(text):
            schema["enum"] = parse_choices(choices[1], argument, name)
            text = text[: choices.start()].strip()
        properties[argument] = schema | ({"description": text} if text else {})
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        # The model never writes a result, so one that JSON cannot express is left out.
        with contextlib.suppress(ConfigError):
            schema["return"] = type_schema(hints["return"], "the result")
            schema["return"] |= {"description": returns} if returns else {}
    return {"type": "function", "function": schema}


def parse_docstring(name: str, text: str) -> tuple[str, dict[str, str], str]:
    """The description, those of the arguments, and that of the result."""
    if not text.strip():
        raise ConfigError(
            f"the tool {name} has no docstring: the model would not know what it does"
        )
    first, *rest = SECTION.split(text.strip())
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    arguments = {}
    for block in split_items(sections.get("Args", "")):
        match = ARGUMENT.match(block)
        if match:
            arguments[match[1]] = re.sub(r"\s*\n\s*", " ", match[2].strip())
    return first.strip(), arguments, sections.get("Returns", "").strip()


def split_items(section: str) -> list[str]:
    """The items of a section: a line that is indented more than the first one continues an item."""
    lines = [line for line in section.splitlines() if line.strip()]
    items: list[str] = []
    for line in lines:
        is_deeper = indentation(line) > indentation(lines[0])
        if items and is_deeper:
            items[-1] += "\n" + line.strip()
        else:
            items.append(line.strip())
    return items


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def parse_choices(text: str, argument: str, name: str) -> list[Any]:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list):
        raise ConfigError(
            f"the choices of the argument {argument} of the tool {name} must be a JSON list, not "
            f"{text!r}"
        )
    return choices


def type_schema(hint: Any, what: str) -> Schema:
    """The schema of the values of a type. Raises ConfigError, which names `what`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return enum_schema([member.value for member in hint], what)
    if origin is None and hint in BASIC_TYPES:
        return dict(BASIC_TYPES[hint])
    if origin in (Union, types.UnionType):
        return union_schema(args, what)
    if origin is Literal:
        return enum_schema(list(args), what)
    if origin is list:
        return {"type": "array", "items": type_schema(args[0], what)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [type_schema(each, what) for each in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(args[1], what)}
    raise ConfigError(
        f"{what} has the type {hint!r}: use int, float, str, bool, Literal, Enum, or list, tuple, "
        "dict and unions of these"
    )


def union_schema(args: tuple[Any, ...], what: str) -> Schema:
    schemas = [type_schema(each, what) for each in args if each is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} for each in schemas):
        names = sorted({each["type"] for each in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in args else {})


def enum_schema(values: list[Any], what: str) -> Schema:
    if not values or any(type(value) not in SCALARS for value in values):
        raise ConfigError(f"{what} must have one or more texts, numbers or booleans as its choices")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}
