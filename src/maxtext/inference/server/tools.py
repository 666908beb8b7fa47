"""Calls of functions: what a request offers, and calls in the text of a completion.

`tool_choice` decides how calls arise. "auto": the model writes them in the form of its family, and
a parser finds them in the text. "required" and a named function: a grammar over the schemas of the
functions, so that the arguments always parse.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maxtext.inference.server.bodies import Body
from maxtext.inference.structured_outputs import StructuredOutputs, schema_text
from maxtext.inference.validation import RequestError, shorten

PARSERS = ("hermes", "none")
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
CALL_HEAD = re.compile(r'\{ ?"name" ?: ?("(?:[^"\\]|\\.)*") ?, ?"arguments" ?: ?(?=[^ ])')
ANY_OBJECT = {"type": "object"}


@dataclass
class ToolDelta:
    """A part of a message: some content, or the beginning or a part of call number `index`."""

    content: str = ""
    index: int | None = None
    name: str | None = None  # in the first part of a call
    arguments: str = ""


class ContentParser:
    """Text without calls. Parsers take text as it comes and return what is certain."""

    def add(self, text: str, last: bool) -> list[ToolDelta]:
        return [ToolDelta(content=text)] if text else []


class NamedCallParser(ContentParser):
    """The text is the arguments of one function."""

    def __init__(self, name: str):
        self.name: str | None = name

    def add(self, text: str, last: bool) -> list[ToolDelta]:
        name, self.name = self.name, None
        return [ToolDelta(index=0, name=name, arguments=text)] if name or text else []


class RequiredCallParser(ContentParser):
    """The text is {"name": ..., "arguments": {...}}, by a grammar."""

    def __init__(self) -> None:
        self.text = ""
        self.has_name = False

    def add(self, text: str, last: bool) -> list[ToolDelta]:
        self.text += text
        name = None
        if not self.has_name:
            match = CALL_HEAD.match(self.text)
            if match is None:
                return [ToolDelta(content=self.text)] if last and self.text else []
            name, self.has_name = json.loads(match[1]), True
            self.text = self.text[match.end() :]
        # The last brace may be that of the call itself, and blanks may precede it.
        ready = self.text.rstrip().removesuffix("}").rstrip()
        self.text = self.text[len(ready) :]
        return [ToolDelta(index=0, name=name, arguments=ready)] if name or ready else []


class HermesParser(ContentParser):
    """Calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, which Qwen and Hermes
    models write. What cannot be parsed as a call is content.
    """

    def __init__(self) -> None:
        self.text = ""
        self.num_calls = 0

    def add(self, text: str, last: bool) -> list[ToolDelta]:
        self.text += text
        deltas: list[ToolDelta] = []
        while (start := self.text.find(CALL_START)) >= 0:
            deltas += self.content(self.text[:start])
            self.text = self.text[start:]
            end = self.text.find(CALL_END)
            if end < 0 and not last:
                return deltas
            end = len(self.text) if end < 0 else end
            inner = self.text[len(CALL_START) : end]
            whole, self.text = self.text[: end + len(CALL_END)], self.text[end + len(CALL_END) :]
            deltas += self.call(inner) or [ToolDelta(content=whole)]
        num_held = 0 if last else partial_length(self.text, CALL_START)
        ready = self.text[: len(self.text) - num_held]
        self.text = self.text[len(ready) :]
        return [*deltas, *self.content(ready)]

    def content(self, text: str) -> list[ToolDelta]:
        """Blanks between calls are no content."""
        is_content = text if not self.num_calls else text.strip()
        return [ToolDelta(content=text)] if is_content else []

    def call(self, text: str) -> list[ToolDelta]:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        self.num_calls += 1
        text = json.dumps(arguments, ensure_ascii=False)
        return [ToolDelta(index=self.num_calls - 1, name=name, arguments=text)]


def find_parser(template: str) -> str:
    """The parser of a model's family, by the tags in its chat template."""
    return "hermes" if CALL_START in template else "none"


def partial_length(text: str, tag: str) -> int:
    """The length of the longest suffix of a text that is a proper prefix of a tag."""
    sizes = range(len(tag) - 1, 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


@dataclass(frozen=True)
class ToolOptions:
    """The functions of a request. `choice` is none, auto, required or the name of a function."""

    schemas: Mapping[str, Any] = field(default_factory=dict)  # of arguments, by name
    choice: str = "none"
    is_named: bool = False

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

    def parser(self, family: str) -> ContentParser:
        """A parser for the text of one choice. `family` is one of PARSERS."""
        if self.is_named:
            return NamedCallParser(self.choice)
        if self.choice == "required":
            return RequiredCallParser()
        return HermesParser() if self.choice == "auto" and family == "hermes" else ContentParser()


def call_schema(name: str, parameters: Any, pointer: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": move_refs(parameters, pointer)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def move_refs(schema: Any, pointer: str) -> Any:
    """A schema for the place `pointer` in another one: its references begin there."""
    if isinstance(schema, list):
        return [move_refs(item, pointer) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: move_refs(value, pointer) for key, value in schema.items()}
    if isinstance(moved.get("$ref"), str) and moved["$ref"].startswith("#"):
        moved["$ref"] = pointer + moved["$ref"][1:]
    return moved


def parse_tools(body: Body) -> ToolOptions:
    """The fields `tools` and `tool_choice`. Raises RequestError if they do not fit."""
    schemas = {}
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise RequestError(f"tools must be a list, not {shorten(tools)}", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name or name in schemas:
            raise RequestError(f"tools[{index}] must have a function with its own name", "tools")
        schemas[name] = function.get("parameters") or ANY_OBJECT
    choice = body.get("tool_choice", "auto" if schemas else "none")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in schemas:
            raise RequestError(
                f"tool_choice names {shorten(name)}, which is not in tools", "tool_choice"
            )
        return ToolOptions(schemas, name, is_named=True)
    if choice not in ("none", "auto", "required") or (choice == "required" and not schemas):
        raise RequestError(
            "tool_choice must be none, auto, required or a function of tools, not "
            f"{shorten(choice)}",
            "tool_choice",
        )
    return ToolOptions(schemas, choice if schemas else "none")


class ToolCallFormatter:
    """The calls of a message as the API has them, whole or as deltas."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def add(self, delta: ToolDelta) -> dict[str, Any]:
        """The delta of a chunk."""
        if delta.index is None:
            return {"content": delta.content}
        if delta.name is None:
            self.calls[delta.index]["function"]["arguments"] += delta.arguments
            return {
                "tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]
            }
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.calls.append(call)
        return {"tool_calls": [{"index": delta.index, **call, "function": dict(function)}]}
