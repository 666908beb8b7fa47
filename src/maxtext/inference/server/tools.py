"""The tools that a request offers.

`tool_choice` decides how tool calls arise. "auto": the model writes them in the form of its family,
and a parser finds them in the text. "required" and a named function: a grammar over the schemas of
the functions, so that the arguments always parse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext.common.log import LOGGER
from maxtext.inference.sampling.structured_outputs import StructuredOutputs, schema_text
from maxtext.inference.text.parsers.message_parser import (
    MessageParser,
    NamedCallParser,
    RequiredCallParser,
)
from maxtext.inference.text.parsers.tool_calls import build_tool_parser
from maxtext.inference.validation import RequestError, shorten

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolOptions:
    """The functions of a request. `choice` is none, auto, required or the name of a function."""

    schemas: Mapping[str, Any] = field(default_factory=dict)  # of arguments, by name
    choice: str = "none"
    is_named: bool = False
    parallel: bool = True  # a message may have several calls
    definitions: tuple[Any, ...] = ()  # for the chat template

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
        """A new parser for the text of one message. `name` is one of `tool_calls.PARSERS`."""
        if self.is_named:
            return NamedCallParser(self.choice)
        if self.choice == "required":
            return RequiredCallParser()
        if not self.is_auto:
            return MessageParser()
        return build_tool_parser(name, self.schemas)


def call_schema(name: str, parameters: Any, pointer: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": move_refs(parameters, pointer)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def move_refs(schema: Any, pointer: str) -> Any:
    """A schema that is nested at `pointer` in another one: its references begin there."""
    if isinstance(schema, list):
        return [move_refs(item, pointer) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: move_refs(value, pointer) for key, value in schema.items()}
    if isinstance(moved.get("$ref"), str) and moved["$ref"].startswith("#"):
        moved["$ref"] = pointer + moved["$ref"][1:]
    return moved


def parse_tools(tools: Sequence[Any], choice: Any, parallel: bool) -> ToolOptions:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError if they do
    not fit.
    """
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name or name in schemas:
            raise RequestError(f"tools[{index}] must have a function with its own name", "tools")
        if tool.get("type", "function") != "function":
            raise RequestError(
                f"tools[{index}].type must be function, not {shorten(tool['type'])}", "tools"
            )
        schemas[name] = function.get("parameters") or ANY_OBJECT
        if not isinstance(schemas[name], Mapping):
            raise RequestError(
                f"tools[{index}].function.parameters must be a JSON schema, an object", "tools"
            )
    if choice is None:
        choice = "auto" if schemas else "none"
    definitions = tuple(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = parse_allowed_tools(choice.get("allowed_tools"), schemas)
        definitions = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
        schemas = {name: schema for name, schema in schemas.items() if name in allowed}
    if isinstance(choice, Mapping):
        name = function_name(choice, schemas)
        return ToolOptions(schemas, name, is_named=True, parallel=parallel, definitions=definitions)
    if choice not in ("none", "auto", "required") or (choice == "required" and not schemas):
        raise RequestError(
            "tool_choice must be none, auto, required, a function of tools or allowed_tools, not "
            f"{shorten(choice)}",
            "tool_choice",
        )
    choice = choice if schemas else "none"
    return ToolOptions(schemas, choice, parallel=parallel, definitions=definitions)


def parse_allowed_tools(value: Any, schemas: Mapping[str, Any]) -> tuple[str, set[str]]:
    """The mode, auto or required, and the names of the functions that may be called."""
    given = value if isinstance(value, Mapping) else {}
    tools, mode = given.get("tools"), given.get("mode")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise RequestError(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools",
            "tool_choice",
        )
    return mode, {function_name(tool, schemas) for tool in tools}


def function_name(choice: Any, schemas: Mapping[str, Any]) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, which must be in `schemas`."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in schemas:
        raise RequestError(
            f"tool_choice names {shorten(name)}, which is not in tools", "tool_choice"
        )
    return name


def parse_functions(tools: Any) -> list[dict[str, Any]]:
    """The functions among `tools` of /v1/responses, as a chat has them; others are ignored."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools must be a list of objects, not {shorten(tools)}", "tools")
    others = sorted(
        {str(tool.get("type"))[:40] for tool in tools if tool.get("type") != "function"}
    )
    if others:
        LOGGER.warning("ignoring tools of the types %s in /v1/responses", ", ".join(others))
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def parse_function_choice(choice: Any) -> Any:
    """The `tool_choice` of /v1/responses, as a chat has it."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        allowed = list(map(parse_function_choice, tools)) if isinstance(tools, list) else tools
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": allowed},
        }
    if isinstance(choice, Mapping):
        kind = shorten(choice.get("type"))
        raise RequestError(
            f"tool_choice.type must be function or allowed_tools, not {kind}", "tool_choice"
        )
    return choice
