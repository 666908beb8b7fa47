"""How the text of a completion becomes the message of a chat.

Messages of chats, and items of /v1/responses, as what a chat template is given.

A template may read any field of a message, so messages stay objects of JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext.inference.server.model import new_id
from maxtext.inference.server.tools import ToolOptions
from maxtext.inference.strict_json import JsonReader
from maxtext.inference.text.parsers.message_parser import (
    FirstCallParser,
    MessageDelta,
    MessageParser,
    ParserChain,
    TagFilter,
)
from maxtext.inference.text.parsers.reasoning import Reasoning
from maxtext.inference.text.parsers.tool_calls import PARSER_TAGS
from maxtext.inference.validation import RequestError, shorten

Message = dict[str, Any]
MAX_DEPTH = 128  # of lists and objects in each other, for recursive functions
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def parse_messages(messages: Any) -> list[Message]:
    """The messages of a conversation, with their contents as text: parts of text are joined."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}]', "messages"
        )
    return [parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def parse_message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} must be an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get(part.get("type")) if is_text(part) else None for part in content]
        parts = [text for text in texts if isinstance(text, str)]
        if len(parts) < len(texts):
            raise RequestError(
                f"{name} has a part that is not text, which this model does not read", "messages"
            )
        content = "".join(parts)
    if not isinstance(message.get("tool_calls") or [], list):
        raise RequestError(f"{name}.tool_calls must be a list", "messages")
    if content is None and message["role"] == "assistant" and not message.get("tool_calls"):
        content = message.get("refusal") or ""  # it may have reasoning alone
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise RequestError(f"{name}.content must be text or parts of text", "messages")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):  # templates have different names for it
        message = {**message, **dict.fromkeys(REASONING_NAMES, reasoning)}
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [parse_call(each) for each in message["tool_calls"]]}
    return {**message, "content": content}


def is_text(part: Any) -> bool:
    """Whether a part of a content is text, of which a refusal is a kind."""
    return isinstance(part, Mapping) and part.get("type") in ("text", "refusal")


def parse_call(call: Any) -> Any:
    """A call of a message, with its arguments as an object, which templates write as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("tool_calls of a message must have functions with names", "messages")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return call
    JsonReader("the arguments of a call", max_depth=MAX_DEPTH).check_depth(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def read_items(instructions: str | None, items: Any) -> list[Message]:
    """The messages of `instructions` and `input` of /v1/responses."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("input must be text or a list of items", "input")
    for index, item in enumerate(items):
        add_item(messages, item, f"input[{index}]")
    return messages


def add_item(messages: list[Message], item: Any, name: str) -> None:
    """Append an item of the input to a conversation. What the model wrote in one turn, its
    reasoning, content and calls, is one message.
    """
    if not isinstance(item, Mapping):
        raise RequestError(f"{name} must be an object, not {shorten(item)}", "input")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        content = join_parts(item.get("content"), f"{name}.content")
        if role == "assistant":
            turn = open_turn(messages)
            turn["content"] = (turn["content"] or "") + content
        elif role in ("system", "developer") and messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += f"\n\n{content}"  # many templates take only one
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "reasoning":
        text = join_parts(item.get("content") or item.get("summary") or "", f"{name}.content")
        turn = open_turn(messages)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        open_turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        if output is None:
            raise RequestError(f"{name}.output is missing", "input")
        is_text = isinstance(output, str | list)
        content = join_parts(output, f"{name}.output") if is_text else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise RequestError(f"{name} has the type {shorten(kind)}, which is not supported", "input")


def open_turn(messages: list[Message]) -> Message:
    """The last message, if the model wrote it, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def join_parts(content: Any, name: str) -> str:
    """The text of a content: a text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
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
    tool_parser: str = "none"  # of `tool_calls.PARSERS`
    hidden_tags: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Special tokens that the parsers must see in the text."""
        tool_tags = PARSER_TAGS[self.tool_parser] if self.tools.is_auto else ()
        return (*self.reasoning.tags, *tool_tags)

    def build_parser(self) -> MessageParser:
        """A new parser for the text of one message."""
        has_channel_calls = self.tool_parser == "gpt_oss" and self.tools.is_auto
        calls = self.tools.build_parser(self.tool_parser)
        parser = self.reasoning.build_parser(calls, has_channel_calls)
        if not self.tools.parallel:
            parser = FirstCallParser(parser)
        return ParserChain(parser, TagFilter(self.hidden_tags)) if self.hidden_tags else parser


class MessageBuilder:
    """A message as the API has it, from its deltas."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, delta: MessageDelta) -> dict[str, Any]:
        """The delta of a chunk."""
        if delta.reasoning:
            self.reasoning += delta.reasoning
            # Some clients read the first name, some the second.
            return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        if delta.index is None:
            self.content += delta.content
            return {"content": delta.content}
        if delta.name is None:
            self.calls[delta.index]["function"]["arguments"] += delta.arguments
            return {
                "tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]
            }
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"id": f"call_{new_id()[:24]}", "type": "function", "function": function}
        self.calls.append(call)
        return {"tool_calls": [{"index": delta.index, **call, "function": dict(function)}]}

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content,
            "refusal": None,
        }
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message
