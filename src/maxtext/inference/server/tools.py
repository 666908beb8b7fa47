"""The tools that a request offers.

`tool_choice` decides how tool calls arise. "auto": the model writes them in the form of its family,
and a parser finds them in the text. "required" and a named function: a grammar over the schemas of
the functions, so that the arguments always parse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.inference.sampling.structured_outputs import StructuredOutputs, schema_text
from maxtext.inference.text.parsers.message_parser import (
    MessageParser,
    NamedCallParser,
    RequiredCallParser,
)
from maxtext.inference.text.parsers.tool_calls import build_tool_parser
from maxtext.inference.validation import RequestError, shorten

ANY_OBJECT = {"type": "object"}
NAMES = ("name", "description", "parameters", "strict")  # of a function in /v1/responses


@dataclass(frozen=True)
class Tool:
    """A function that a request offers. `definition` is what the chat template is given."""

    name: str
    parameters: Json  # a JSON schema
    definition: Json


@dataclass(frozen=True)
class ToolChoice:
    """`mode` is none, auto, required, or named: the function of this name must be called. `allowed`
    are the names of the functions that may be called; None: all of them.
    """

    mode: str
    name: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True)
class ToolOptions:
    """The functions of a request. `choice` is none, auto, required or the name of a function."""

    schemas: Mapping[str, Json] = field(default_factory=dict)  # of arguments, by name
    choice: str = "none"
    is_named: bool = False
    parallel: bool = True  # a message may have several calls
    definitions: tuple[Json, ...] = ()  # for the chat template

    @classmethod
    def from_choice(
        cls, tools: Sequence[Tool], choice: ToolChoice, parallel: bool
    ) -> "ToolOptions":
        if choice.allowed is not None:
            tools = [tool for tool in tools if tool.name in choice.allowed]
        is_named = choice.mode == "named"
        mode = choice.mode if tools else "none"
        return cls(
            schemas={tool.name: tool.parameters for tool in tools},
            choice=choice.name if is_named else mode,
            is_named=is_named,
            parallel=parallel,
            definitions=tuple(tool.definition for tool in tools),
        )

    @property
    def is_auto(self) -> bool:
        """Whether what the model writes is parsed for calls."""
        return self.choice == "auto" and not self.is_named

    def constraint(self) -> StructuredOutputs | None:
        """The grammar of the completion, if a call is required."""
        if self.is_named:
            schema = self.schemas[self.choice]
        elif self.choice == "required":
            schema = {
                "anyOf": [
                    call_schema(name, parameters, f"#/anyOf/{index}/properties/arguments")
                    for index, (name, parameters) in enumerate(self.schemas.items())
                ]
            }
        else:
            return None
        return StructuredOutputs("json", schema_text(schema, "tools"), "tools")

    def build_parser(self, name: str) -> MessageParser:
        """A new parser for the text of one message. `name` is one of `tool_calls.TOOL_PARSERS`."""
        if self.is_named:
            return NamedCallParser(self.choice)
        if self.choice == "required":
            return RequiredCallParser()
        if not self.is_auto:
            return MessageParser()
        return build_tool_parser(name, self.schemas)


def call_schema(name: str, parameters: Json, pointer: str) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": move_refs(parameters, pointer)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def move_refs(schema: object, pointer: str) -> object:
    """A schema that is nested at `pointer` in another one: its references begin there."""
    if isinstance(schema, list):
        return [move_refs(item, pointer) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: move_refs(value, pointer) for key, value in schema.items()}
    match moved:
        case {"$ref": str(ref)} if ref.startswith("#"):
            moved["$ref"] = pointer + ref[1:]
    return moved


def parse_tools(values: object) -> list[Tool]:
    """The field `tools` of a chat. Raises RequestError for the first that is wrong."""
    if not isinstance(values, list):
        raise RequestError(f"tools must be a list, not {shorten(values)}", "tools")
    tools: dict[str, Tool] = {}
    for index, value in enumerate(values):
        name, function = read_function(value)
        if not isinstance(value, dict) or not isinstance(name, str) or not name or name in tools:
            raise RequestError(f"tools[{index}] must have a function with its own name", "tools")
        if (kind := value.get("type", "function")) != "function":
            message = f"tools[{index}].type must be function, not {shorten(kind)}"
            raise RequestError(message, "tools")
        parameters = function.get("parameters") or ANY_OBJECT
        if not isinstance(parameters, dict):
            raise RequestError(
                f"tools[{index}].function.parameters must be a JSON schema, an object", "tools"
            )
        tools[name] = Tool(name, parameters, value)
    return list(tools.values())


def read_function(value: object) -> tuple[object, Json]:
    """The name in {"type": "function", "function": {"name": ...}}, and the function; None and {} if
    it has none.
    """
    match value:
        case {"function": dict(function)}:
            return function.get("name"), function
    return None, {}


def parse_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The field `tool_choice` of a chat. Raises RequestError if it does not fit the tools."""
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}}:
            return allow(mode, [read_function(each)[0] for each in allowed], tools)
        case {"type": "allowed_tools"}:
            return allow(None, [], tools)
        case dict():
            return ToolChoice("named", check_name(read_function(value)[0], names_of(tools)))
    return parse_mode(value, tools)


def parse_mode(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """A choice without names: none, auto or required; None: auto, if there are tools."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value not in ("none", "auto", "required") or (value == "required" and not tools):
        raise RequestError(
            "tool_choice must be none, auto, required, a function of tools or allowed_tools, not "
            f"{shorten(value)}",
            "tool_choice",
        )
    return ToolChoice(str(value))


def allow(mode: object, names: Sequence[object], tools: Sequence[Tool]) -> ToolChoice:
    if mode not in ("auto", "required") or not names:
        raise RequestError(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools",
            "tool_choice",
        )
    known = names_of(tools)
    return ToolChoice(str(mode), allowed=frozenset(check_name(name, known) for name in names))


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools)


def check_name(name: object, known: frozenset[str]) -> str:
    """Raises RequestError for a name that no tool has."""
    if not isinstance(name, str) or name not in known:
        raise RequestError(
            f"tool_choice names {shorten(name)}, which is not in tools", "tool_choice"
        )
    return name


def read_functions(tools: object) -> list[Json]:
    """The functions among `tools` of /v1/responses, as a chat has them; others are ignored."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"tools must be a list of objects, not {shorten(tools)}", "tools")
    others = sorted(
        {str(tool.get("type"))[:40] for tool in tools if tool.get("type") != "function"}
    )
    if others:
        LOGGER.warning("ignoring tools of the types %s in /v1/responses", ", ".join(others))
    return [
        {"type": "function", "function": {name: tool[name] for name in NAMES if name in tool}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def parse_function_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """The `tool_choice` of /v1/responses."""
    match value:
        case {"type": "allowed_tools", "mode": mode, "tools": [*allowed]}:
            return allow(mode, [read_name(each) for each in allowed], tools)
        case {"type": "allowed_tools"}:
            return allow(None, [], tools)
        case dict():
            return ToolChoice("named", check_name(read_name(value), names_of(tools)))
    return parse_mode(value, tools)


def read_name(value: object) -> object:
    """The name in {"type": "function", "name": ...}; None if it has none."""
    match value:
        case {"type": "function", "name": name}:
            return name
        case {"type": "function" | "allowed_tools"}:
            return None
        case dict(fields):
            kind = shorten(fields.get("type"))
            raise RequestError(
                f"tool_choice.type must be function or allowed_tools, not {kind}", "tool_choice"
            )
    return None
