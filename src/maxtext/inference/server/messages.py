"""How the text of a completion becomes the message of a chat."""

from dataclasses import dataclass, field
from typing import Any

from maxtext.inference.server.model import new_id
from maxtext.inference.server.tools import ToolOptions
from maxtext.inference.text.parsers.message_parser import (
    FirstCallParser,
    MessageDelta,
    MessageParser,
    ParserChain,
    TagFilter,
)
from maxtext.inference.text.parsers.reasoning import Reasoning
from maxtext.inference.text.parsers.tool_calls import PARSER_TAGS


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
