"""Parsers of messages: from the text of a completion, as it comes, to content, reasoning and calls
of functions.

A parser takes text in parts of any size and returns what is certain. The joined deltas do not
depend on the sizes of the parts.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from maxtext.common.types import Json

CALL_HEAD = re.compile(r'\{ ?"name" ?: ?("(?:[^"\\]|\\.)*") ?, ?"arguments" ?: ?(?=[^ ])')


@dataclass
class MessageDelta:
    """A part of a message: some content or reasoning, or the beginning or a part of call number
    `index`.
    """

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    name: str | None = None  # in the first part of a call
    arguments: str = ""


class MessageParser:
    """Text without calls."""

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        """Append text and return what is certain now. With `last`, no text follows."""
        return [MessageDelta(content=text)] if text else []


class ParserChain(MessageParser):
    """The content of one parser is the text of the next."""

    def __init__(self, first: MessageParser, second: MessageParser):
        self.first = first
        self.second = second

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        deltas: list[MessageDelta] = []
        for delta in self.first.add(text, last):
            if delta.content:
                deltas += self.second.add(delta.content, last=False)
            else:
                deltas.append(delta)
        return [*deltas, *self.second.add("", last=True)] if last else deltas


class TagFilter(MessageParser):
    """Content without the names of special tokens, which only the parsers before need to see."""

    def __init__(self, tags: Sequence[str]):
        self.tags = tags
        self.pattern = re.compile("|".join(map(re.escape, tags)))
        self.text = ""  # the beginning of a name, maybe

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        # Of what is left of a text, only its end can begin a name.
        *complete, rest = self.pattern.split(self.text + text)
        pending = 0 if last else max(partial_length(rest, tag) for tag in self.tags)
        ready = len(rest) - pending
        self.text = rest[ready:]
        return super().add("".join([*complete, rest[:ready]]), last)


class FirstCallParser(MessageParser):
    """Drops all calls of another parser but the first."""

    def __init__(self, inner: MessageParser):
        self.inner = inner

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        return [delta for delta in self.inner.add(text, last) if not delta.index]


class NamedCallParser(MessageParser):
    """The text is the arguments of one function."""

    def __init__(self, name: str):
        self.name: str | None = name

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        name, self.name = self.name, None
        deltas = [MessageDelta(index=0, name=name)] if name else []
        return [*deltas, MessageDelta(index=0, arguments=text)] if text else deltas


class RequiredCallParser(MessageParser):
    """The text is {"name": ..., "arguments": {...}}, by a grammar."""

    def __init__(self) -> None:
        self.text = ""
        self.has_name = False

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas = []
        if not self.has_name:
            match = CALL_HEAD.match(self.text)
            if match is None:
                return [MessageDelta(content=self.text)] if last and self.text else []
            self.has_name = True
            self.text = self.text[match.end() :]
            deltas = [MessageDelta(index=0, name=json.loads(match[1]))]
        # The last brace may be that of the call itself, and blanks may precede it.
        ready = self.text.rstrip().removesuffix("}").rstrip()
        self.text = self.text[len(ready) :]
        return [*deltas, MessageDelta(index=0, arguments=ready)] if ready else deltas


def call_deltas(index: int, name: str, arguments: str | Json) -> list[MessageDelta]:
    """A whole call: first its name, then its arguments."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [MessageDelta(index=index, name=name), MessageDelta(index=index, arguments=text)]


def partial_length(text: str, tag: str) -> int:
    """The length of the longest suffix of a text that is a proper prefix of a tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
