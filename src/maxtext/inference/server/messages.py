"""Messages of chats, and items of /v1/responses; how the text of a completion becomes a message.

A template may read any field of a message, so a message has them besides its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maxtext.common.types import Json
from maxtext.inference.server.tools import ToolOptions
from maxtext.inference.strict_json import JsonReader
from maxtext.inference.text.parsers.message_parser import (
    FirstCallParser,
    MessageParser,
    ParserChain,
    TagFilter,
)
from maxtext.inference.text.parsers.reasoning import Reasoning
from maxtext.inference.text.parsers.tool_calls import PARSER_TAGS
from maxtext.inference.validation import RequestError, shorten

MAX_DEPTH = 128  # of lists and objects in each other, for recursive functions
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


@dataclass(frozen=True)
class ToolCall:
    """A call in a message. `fields` and `function` have what a template may read besides."""

    arguments: object  # of JSON; the text that the client gave, if it is not JSON
    function: Json
    fields: Json

    @classmethod
    def parse(cls, call: object) -> "ToolCall":
        fields = call if isinstance(call, dict) else {}
        function = fields.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("tool_calls of a message must have functions with names", "messages")
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError):
            return cls(function["arguments"], function, fields)
        JsonReader("the arguments of a call", max_depth=MAX_DEPTH).check_depth(arguments)
        return cls(arguments, function, fields)

    def to_json(self) -> Json:
        """With the arguments as an object, which templates write as JSON."""
        return {**self.fields, "function": {**self.function, "arguments": self.arguments}}


class Message(NamedTuple):
    """A message of a conversation. A template may read any field of a message: `fields` are those
    that the client gave.
    """

    role: str
    content: str | None  # None: tool calls only
    fields: Json
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def plain(cls, role: str, content: str, **fields: object) -> "Message":
        return cls(role, content, {"role": role, **fields, "content": content})

    @classmethod
    def parse(cls, message: object, name: str) -> "Message":
        """A message of a chat; its parts of text are joined. `name` is for errors."""
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise RequestError(f"{name} must be an object with a role", "messages")
        content, calls = message.get("content"), message.get("tool_calls") or []
        if isinstance(content, list):
            texts = list(map(part_text, content))
            content = "".join(text for text in texts if text is not None)
            if None in texts:
                raise RequestError(
                    f"{name} has a part that is not text, which this model does not read",
                    "messages",
                )
        if not isinstance(calls, list):
            raise RequestError(f"{name}.tool_calls must be a list", "messages")
        if content is None and role == "assistant" and not calls:
            content = message.get("refusal") or ""  # it may have reasoning alone
        if not isinstance(content, str) and (content is not None or not calls):
            raise RequestError(f"{name}.content must be text or parts of text", "messages")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        return cls(
            role,
            content,
            message,
            reasoning if isinstance(reasoning, str) else None,
            tuple(map(ToolCall.parse, calls)) if calls else (),
        )

    def to_json(self) -> Json:
        """The message for a template, which may have any of several names for the reasoning."""
        fields = self.fields
        if self.reasoning is not None:
            fields = {**fields, **dict.fromkeys(REASONING_NAMES, self.reasoning)}
        if self.tool_calls:
            fields = {**fields, "tool_calls": [call.to_json() for call in self.tool_calls]}
        return {**fields, "role": self.role, "content": self.content}


def part_text(part: object) -> str | None:
    """The text of a part of a content, of which a refusal is a kind; None if it is another."""
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
    return None


def parse_messages(messages: object) -> list[Message]:
    """The messages of a conversation. Raises RequestError for the first that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}]', "messages"
        )
    return [Message.parse(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_items(instructions: str | None, items: object) -> list[Message]:
    """The messages of `instructions` and `input` of /v1/responses."""
    turns = Turns([Message.plain("system", instructions)] if instructions else [])
    if isinstance(items, str):
        turns.add_text("user", items)
        return turns.messages
    if not isinstance(items, list) or not items:
        raise RequestError("input must be text or a list of items", "input")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}] must be an object, not {shorten(item)}", "input")
        turns.add_item(item, f"input[{index}]")
    turns.end_turn()
    return turns.messages


class Turns:
    """A conversation from items. What the model wrote in one turn, its reasoning, content and
    calls, is one message.
    """

    def __init__(self, messages: list[Message]):
        self.messages = messages
        # Parts of the message of an open turn by its fields, in the order in which items have them:
        # a template may write a message as JSON.
        self.turn: dict[str, list[Any]] = {}

    def add_item(self, item: Json, name: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self.add_text(item.get("role"), join_parts(item.get("content"), f"{name}.content"))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ""
            self.add_part("reasoning_content", join_parts(parts, f"{name}.content"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self.add_part("tool_calls", ToolCall.parse(call))
        elif kind == "function_call_output":
            output = item.get("output")
            if output is None:
                raise RequestError(f"{name}.output is missing", "input")
            is_text = isinstance(output, str | list)
            content = join_parts(output, f"{name}.output") if is_text else json.dumps(output)
            self.end_turn()
            self.messages.append(Message.plain("tool", content, tool_call_id=item.get("call_id")))
        else:
            raise RequestError(
                f"{name} has the type {shorten(kind)}, which is not supported", "input"
            )

    def add_text(self, role: object, text: str) -> None:
        if role == "assistant":
            self.add_part("content", text)
            return
        self.end_turn()
        last = self.messages[-1] if self.messages else None
        if role in ("system", "developer"):
            if last is not None and last.role == "system":  # many templates take only one
                self.messages[-1] = last._replace(content=f"{last.content}\n\n{text}")
            else:
                self.messages.append(Message.plain("system", text))
        elif isinstance(role, str):
            self.messages.append(Message.plain(role, text))
        else:
            name = f"messages[{len(self.messages)}]"
            raise RequestError(f"{name} must be an object with a role", "input")

    def add_part(self, name: str, part: str | ToolCall) -> None:
        """Add to a field of the message of the model's turn, which begins with its first part."""
        self.turn = self.turn or {"content": []}
        self.turn.setdefault(name, []).append(part)

    def end_turn(self) -> None:
        if not self.turn:
            return
        parts, self.turn = self.turn, {}
        content, reasoning = (
            "".join(parts.get(name, ())) for name in ("content", "reasoning_content")
        )
        values = {"content": content, "reasoning_content": reasoning, "tool_calls": None}
        fields: Json = {"role": "assistant", **{name: values[name] for name in parts}}
        calls = tuple(parts.get("tool_calls", ()))  # `to_json` writes them to the field
        self.messages.append(Message("assistant", content, fields, reasoning or None, calls))


def join_parts(content: object, name: str) -> str:
    """The text of a content: a text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    texts = []
    parts: Sequence[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        text = part.get("refusal", part.get("text")) if is_text else None
        if not isinstance(text, str):
            raise RequestError(f"{name} must be text or parts of text", "input")
        texts.append(text)
    return "".join(texts)


@dataclass(frozen=True)
class MessageFormat:
    """The parsers of a request. `hidden_tags` are names of special tokens that the text has for
    the parsers, and that are no content.
    """

    tools: ToolOptions = field(default_factory=ToolOptions)
    reasoning: Reasoning = field(default_factory=Reasoning)
    tool_parser: str = "none"  # of `tool_calls.TOOL_PARSERS`
    hidden_tags: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Special tokens that the parsers must see in the text."""
        tool_tags = PARSER_TAGS[self.tool_parser] if self.tools.is_auto else ()
        return (*self.reasoning.tags, *tool_tags)

    def build_parser(self) -> MessageParser:
        """A new parser for the text of one message."""
        has_channel_calls = self.tool_parser == "harmony" and self.tools.is_auto
        calls = self.tools.build_parser(self.tool_parser)
        parser = self.reasoning.build_parser(calls, has_channel_calls)
        if not self.tools.parallel:
            parser = FirstCallParser(parser)
        return ParserChain(parser, TagFilter(self.hidden_tags)) if self.hidden_tags else parser
