"""Tool calls from text in parts: arguments are passed on while the model writes them.

A text becomes a call with the first value of its arguments. Before that, text that does not go on
as a call is content; after it, the arguments end where the model ends them, valid or not.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxtext.common.types import Json
from maxtext.inference.text.parsers.json_scanner import JsonScanner
from maxtext.inference.text.parsers.message_parser import MessageDelta, call_deltas, partial_length

Schemas = Mapping[str, Json]  # of arguments, by the name of the function
Call = tuple[str, Json]  # name, arguments
CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
JSON_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class XmlSyntax:
    """How a family writes a call whose parameters have tags."""

    head: re.Pattern[str]  # with the name of the function
    parameter_start: str
    parameter_head: re.Pattern[str]  # with the name of the parameter, up to its value
    parameter_end: str
    end: str | None = None  # of the function, before the end of the call
    # A call without parameters may be the name of a function alone.
    has_bare_names: bool = False


# <function=NAME><parameter=KEY>VALUE</parameter>...</function>
FUNCTION_SYNTAX = XmlSyntax(
    head=re.compile(r"\s*<function=([^>\s]+)>"),
    parameter_start="<parameter=",
    parameter_head=re.compile(r"\s*<parameter=([^>\s]+)>"),
    parameter_end="</parameter>",
    end="</function>",
)
# NAME, line break, <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...
GLM_SYNTAX = XmlSyntax(
    head=re.compile(r"\s*([^\s<]+)(?:[ \t]*\n|\s*(?=<arg_key>))"),
    parameter_start="<arg_key>",
    parameter_head=re.compile(r"\s*<arg_key>\s*([^<\s]+)\s*</arg_key>\s*<arg_value>"),
    parameter_end="</arg_value>",
    has_bare_names=True,
)
# name="NAME"><parameter name="KEY">VALUE</parameter>..., after <invoke
INVOKE_SYNTAX = XmlSyntax(
    head=re.compile(r"\s+name=\"?([^\s\">]+)\"?\s*>"),
    parameter_start="<parameter name=",
    parameter_head=re.compile(r"\s*<parameter name=\"?([^\s\">]+)\"?\s*>"),
    parameter_end="</parameter>",
)


class CallReader(ABC):
    """Reads one call. `text` is what it has read until it is a call."""

    def __init__(self, index: int):
        self.index = index
        self.text = ""
        self.is_call = False

    @property
    def num_calls(self) -> int:
        return int(self.is_call)

    @abstractmethod
    def add(self, text: str) -> list[MessageDelta]:
        """Append text of the call and return what is certain now."""

    @abstractmethod
    def finish(self, is_closed: bool) -> list[MessageDelta]:
        """The deltas that are left when the text ends; `is_closed`: by the end of the call."""

    def split(self, text: str, end: str, last: bool) -> tuple[str, str, bool]:
        """(text of the call, rest, whether the call is closed) at the tag `end`. While the call is
        open, the next text continues the rest.
        """
        inner, tag, rest = text.partition(end)
        if tag or last:
            return inner, rest, bool(tag)
        ready = len(text) - partial_length(text, end)
        return text[:ready], text[ready:], False


class ObjectReader(CallReader):
    """Reads a call that ends with a JSON object. `rest` is the text after it, or the text from
    where it is no JSON.
    """

    def __init__(self, index: int):
        super().__init__(index)
        self.scanner = JsonScanner()
        self.rest = ""

    @property
    def is_broken(self) -> bool:
        """Whether arguments that were passed on have become invalid: all text belongs to them."""
        return self.is_call and self.scanner.is_invalid

    @property
    def has_ended(self) -> bool:
        """Whether further text does not belong to the call."""
        return self.scanner.is_complete or (self.scanner.is_invalid and not self.is_broken)

    def take(self, text: str) -> str:
        """The part of a text that belongs to the object."""
        is_open = not self.scanner.is_complete and not self.scanner.is_invalid
        size = self.scanner.add(text) if is_open else 0
        self.rest += text[size:]
        return text[:size]

    def take_rest(self) -> list[MessageDelta]:
        """The rest, as a part of the arguments."""
        rest, self.rest = self.rest, ""
        return [MessageDelta(index=self.index, arguments=rest)] if rest else []


class ArgumentsReader(ObjectReader):
    """The arguments of the function `name`, a JSON object."""

    def __init__(self, index: int, name: str):
        super().__init__(index)
        self.name = name

    def add(self, text: str) -> list[MessageDelta]:
        ready, self.text = self.text + self.take(text), ""
        if not self.scanner.has_value:
            self.text = ready
            return []
        deltas = [] if self.is_call else [MessageDelta(index=self.index, name=self.name)]
        self.is_call = True
        if ready:
            deltas.append(MessageDelta(index=self.index, arguments=ready))
        return [*deltas, *self.take_rest()] if self.is_broken else deltas

    def finish(self, is_closed: bool) -> list[MessageDelta]:
        return []


class JsonCallReader(CallReader):
    """{"name": ..., "arguments": {...}}. Arguments that precede the name, or that are JSON in a
    text, are known at the end. What follows the arguments is dropped.
    """

    def __init__(self, index: int):
        super().__init__(index)
        self.arguments: ArgumentsReader | None = None
        self.scanner = JsonScanner()  # of the whole call
        self.num_scanned = 0  # characters that the rest of `split` begins with

    def split(self, text: str, end: str, last: bool) -> tuple[str, str, bool]:
        """A tag within a string of the call does not end it, if the call is complete JSON. Text
        from such a tag on waits until that is known.
        """
        scanner = self.scanner
        if scanner.is_complete or scanner.is_invalid:
            return super().split(text, end, last)
        size = self.num_scanned + scanner.add(text[self.num_scanned :])
        if scanner.is_complete:
            inner, rest, is_closed = super().split(text[size:], end, last)
            return text[:size] + inner, rest, is_closed
        inner, rest, is_closed = super().split(text, end, last)
        if is_closed and not last and not scanner.is_invalid:
            rest, is_closed = text[len(inner) :], False
        self.num_scanned = len(rest)
        return inner, rest, is_closed

    def add(self, text: str) -> list[MessageDelta]:
        if not self.is_call:
            self.text += text
        if self.arguments is None:
            match = CALL_HEAD.match(self.text)
            name, _ = decode_json(match[1]) if match else (None, 0)
            if match is None or not isinstance(name, str):
                return []
            self.arguments = ArgumentsReader(self.index, name)
            text = self.text[match.end() :]
        deltas = self.arguments.add(text)
        self.is_call = self.arguments.is_call
        return deltas

    def finish(self, is_closed: bool) -> list[MessageDelta]:
        if self.is_call:
            return []
        call, size = decode_call(self.text.strip())
        if call is None or size < len(self.text.strip()):
            return []
        self.is_call = True
        return call_deltas(self.index, *call)


class ObjectCallReader(ObjectReader):
    """A call as `JsonCallReader` reads it, without tags: it ends with its object."""

    def __init__(self, index: int):
        super().__init__(index)
        self.call = JsonCallReader(index)

    @property
    def is_broken(self) -> bool:
        arguments = self.call.arguments
        is_open = arguments is not None and not arguments.scanner.is_complete
        return super().is_broken and is_open

    def add(self, text: str) -> list[MessageDelta]:
        taken = self.take(text)
        self.text += taken
        deltas = self.call.add(taken)
        self.is_call = self.call.is_call
        return [*deltas, *self.take_rest()] if self.is_broken else deltas

    def finish(self, is_closed: bool) -> list[MessageDelta]:
        deltas = self.call.finish(is_closed)
        self.is_call = self.call.is_call
        return deltas


class XmlCallReader(CallReader):
    """A call whose parameters have tags, as Qwen3-Coder, GLM and MiniMax write it. The schema of
    the function says which values are texts; others are JSON where they can be. Each parameter is
    passed on when it is complete.

    Values are not escaped. One that has the tag of the end of a call goes on after it if the
    parameter's end follows before another parameter begins.
    """

    def __init__(self, index: int, schemas: Schemas, syntax: XmlSyntax = FUNCTION_SYNTAX):
        super().__init__(index)
        self.schemas = schemas
        self.syntax = syntax
        self.name: str | None = None
        self.position = 0  # of what was not read yet
        self.num_parameters = 0

    def split(self, text: str, end: str, last: bool) -> tuple[str, str, bool]:
        """Text from a tag in a value on waits until it is known whether the value goes on."""
        unread = self.text[self.position :] + text
        num_read = len(unread) - len(text)
        syntax = self.syntax
        match = syntax.head.match(unread) if self.name is None else None
        position = match.end() if match else 0
        while match := syntax.parameter_head.match(unread, position):
            close = unread.find(syntax.parameter_end, match.end())
            stop = len(unread) if close < 0 else close
            tag = unread.find(end, match.end(), stop)
            size = tag - num_read
            is_next = tag >= 0 and unread.find(syntax.parameter_start, tag, stop) >= 0
            if is_next or (tag >= 0 and last and close < 0):
                return text[:size], text[size + len(end) :], True
            if tag >= 0 and close < 0:
                return text[:size], text[size:], False
            if close < 0:
                break
            position = close + len(syntax.parameter_end)
        in_values = max(position - num_read, 0)
        inner, rest, is_closed = super().split(text[in_values:], end, last)
        return text[:in_values] + inner, rest, is_closed

    def add(self, text: str) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        if self.name is None:
            match = self.syntax.head.match(self.text)
            if match is None:
                return []
            self.name, self.position = match[1], match.end()
        while match := self.syntax.parameter_head.match(self.text, self.position):
            close = self.text.find(self.syntax.parameter_end, match.end())
            if close < 0:
                break
            self.position = close + len(self.syntax.parameter_end)
            value = self.text[match.end() : close]
            deltas += self.parameter(match[1], value.removeprefix("\n").removesuffix("\n"))
        return deltas

    def parameter(self, key: str, text: str) -> list[MessageDelta]:
        schema = self.schemas.get(self.name or "")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        value = json.dumps(parse_value(text, properties.get(key)), ensure_ascii=False)
        start = ", " if self.num_parameters else "{"
        self.num_parameters += 1
        member = f"{start}{json.dumps(key, ensure_ascii=False)}: {value}"
        return [*self.begin(), MessageDelta(index=self.index, arguments=member)]

    def begin(self) -> list[MessageDelta]:
        is_call, self.is_call = self.is_call, True
        return [] if is_call else [MessageDelta(index=self.index, name=self.name)]

    def finish(self, is_closed: bool) -> list[MessageDelta]:
        rest, end = self.text[self.position :].strip(), self.syntax.end
        if self.name is None and self.syntax.has_bare_names and is_closed and rest in self.schemas:
            self.name, rest = rest, ""
        is_complete = rest in ("", end) and (is_closed or rest == end)
        if self.name is None or not (is_complete or (self.is_call and is_closed)):
            return []
        braces = "}" if self.num_parameters else "{}"
        return [*self.begin(), MessageDelta(index=self.index, arguments=braces)]


ReaderFactory = Callable[[int], CallReader]  # of the index of a call


def decode_json(text: str) -> tuple[object, int]:
    """The JSON value at the beginning of a text, and its length; (None, 0) if there is none."""
    try:
        return JSON_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def decode_call(text: str) -> tuple[Call | None, int]:
    value, size = decode_json(text)
    return parse_call(value), size


def parse_call(value: object) -> Call | None:
    """{"name": ..., "arguments": {...}}, or with `parameters` in place of arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as JSON in a text
        arguments, _ = decode_json(arguments)
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def parse_value(text: str, schema: object) -> object:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    lowered = text.strip().lower()
    if lowered in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(lowered)
    value, size = decode_json(text.strip())
    return value if size and size == len(text.strip()) else text
