"""Calls of functions in the text of a completion, in the forms that families of models write.

What cannot be parsed as a call is content.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from maxtext.inference.server.message_parsers import (
    MessageDelta,
    MessageParser,
    call_deltas,
    partial_length,
)

Schemas = Mapping[str, Any]  # of arguments, by the name of the function
Call = tuple[str, Any]  # name, arguments
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
MISTRAL_CALL = re.compile(r"\s*([^\s\[\]{}\"]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
JSON_DECODER = json.JSONDecoder()


class TaggedCallParser(MessageParser):
    """Calls between two tags. `parse` returns the call of the text between them, or None."""

    def __init__(self, start: str, end: str, parse: Callable[[str], Call | None]):
        self.start = start
        self.end = end
        self.parse = parse
        self.text = ""
        self.num_calls = 0

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        while (start := self.text.find(self.start)) >= 0:
            deltas += self.content(self.text[:start])
            self.text = self.text[start:]
            end = self.text.find(self.end)
            if end < 0 and not last:
                return deltas
            size = end + len(self.end) if end >= 0 else len(self.text)
            inner = self.text[len(self.start) : end if end >= 0 else size]
            deltas += self.call(inner) or self.content(self.text[:size])
            self.text = self.text[size:]
        ready = len(self.text) - (0 if last else partial_length(self.text, self.start))
        deltas += self.content(self.text[:ready])
        self.text = self.text[ready:]
        return deltas

    def content(self, text: str) -> list[MessageDelta]:
        # Templates separate calls by line breaks, which are no content.
        is_content = text if not self.num_calls else text.strip()
        return [MessageDelta(content=text)] if is_content else []

    def call(self, text: str) -> list[MessageDelta]:
        call = self.parse(text)
        if call is None:
            return []
        self.num_calls += 1
        return call_deltas(self.num_calls - 1, *call)


class LlamaParser(MessageParser):
    """The message is calls {"name": ..., "parameters": {...}}, separated by semicolons, maybe after
    <|python_tag|>. A message that begins otherwise has no calls.
    """

    tag = "<|python_tag|>"

    def __init__(self) -> None:
        self.text = ""
        self.num_calls = 0
        self.is_content = False

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        while not self.is_content and self.text:
            rest = self.text.lstrip()
            may_begin = self.tag.startswith(rest) and not last
            rest = rest.removeprefix(self.tag).lstrip()
            rest = rest.lstrip("; \n") if self.num_calls else rest
            if may_begin or (not rest and not last):
                return deltas
            call, size = decode_call(rest) if "}" in rest else (None, 0)
            if call is not None:
                deltas += call_deltas(self.num_calls, *call)
                self.num_calls += 1
                self.text = rest[size:]
                continue
            if rest.startswith("{") and not size and not last:
                return deltas  # the object is not complete
            self.is_content = True
        ready, self.text = self.text, ""
        if not ready.strip() and self.num_calls:
            return deltas
        return [*deltas, MessageDelta(content=ready)] if ready else deltas


class MistralParser(MessageParser):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or for each call
    [TOOL_CALLS]name[ARGS]{...}.
    """

    tag = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self.text = ""
        self.num_calls = 0
        self.in_calls = False

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        if not self.in_calls:
            start = self.text.find(self.tag)
            pending = 0 if last else partial_length(self.text, self.tag)
            ready = start if start >= 0 else len(self.text) - pending
            if ready:
                deltas.append(MessageDelta(content=self.text[:ready]))
            self.text = self.text[ready:]
            if start < 0:
                return deltas
            self.in_calls = True
        while self.text and (calls := self.take_calls()):
            for call in calls:
                deltas += call_deltas(self.num_calls, *call)
                self.num_calls += 1
        if last and self.text.strip():
            deltas.append(MessageDelta(content=self.text))
        return deltas

    def take_calls(self) -> list[Call]:
        """Remove what the text has of complete calls at its beginning."""
        text = self.text.removeprefix(self.tag).lstrip() if "}" in self.text else ""
        if text.startswith("["):
            values, size = decode_json(text)
            parsed = [parse_call(value) for value in values or ()]
            calls = [call for call in parsed if call is not None]
            if not calls or len(calls) < len(parsed):
                return []
        else:
            match = MISTRAL_CALL.match(text)
            arguments, size = decode_json(text[match.end() :]) if match else (None, 0)
            if match is None or not isinstance(arguments, dict):
                return []
            calls, size = [(match[1], arguments)], size + match.end()
        self.text = text[size:].lstrip()
        return calls


def decode_json(text: str) -> tuple[Any, int]:
    """The JSON value at the beginning of a text, and its length; (None, 0) if there is none."""
    try:
        return JSON_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def decode_call(text: str) -> tuple[Call | None, int]:
    value, size = decode_json(text)
    return parse_call(value), size


def parse_call(value: Any) -> Call | None:
    """{"name": ..., "arguments": {...}}, or with `parameters` in place of arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as JSON in a text
        arguments, _ = decode_json(arguments)
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def parse_json_call(text: str) -> Call | None:
    call, size = decode_call(text.strip())
    return call if size == len(text.strip()) else None


def parse_xml_call(text: str, schemas: Schemas) -> Call | None:
    """<function=NAME><parameter=KEY>VALUE</parameter>...</function>, as Qwen3-Coder writes it. The
    schema of the function says which values are texts; others are JSON where they can be.
    """
    match = FUNCTION.fullmatch(text)
    if match is None:
        return None
    schema = schemas.get(match[1])
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    arguments, end = {}, 0
    for parameter in PARAMETER.finditer(match[2]):
        if match[2][end : parameter.start()].strip():
            return None
        end = parameter.end()
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[parameter[1]] = parse_value(value, properties.get(parameter[1]))
    return None if match[2][end:].strip() else (match[1], arguments)


def parse_value(text: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    lowered = text.strip().lower()
    if lowered in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(lowered)
    value, size = decode_json(text.strip())
    return value if size and size == len(text.strip()) else text


HERMES_TAGS = ("<tool_call>", "</tool_call>")
# Special tokens that a parser must see in the text, by its name.
PARSER_TAGS: dict[str, tuple[str, ...]] = {
    "hermes": HERMES_TAGS,
    "llama3_json": (LlamaParser.tag,),
    "mistral": (MistralParser.tag, "[ARGS]", "[CALL_ID]"),
    "qwen3_coder": HERMES_TAGS,
    "gpt_oss": (),  # the reasoning parser of this name reads calls
    "none": (),
}
PARSERS = tuple(PARSER_TAGS)


def build_tool_parser(name: str, schemas: Schemas) -> MessageParser:
    """A new parser for one message, by a name of PARSERS."""
    if name == "hermes":
        return TaggedCallParser(*HERMES_TAGS, parse_json_call)
    if name == "qwen3_coder":
        return TaggedCallParser(*HERMES_TAGS, lambda text: parse_xml_call(text, schemas))
    if name == "llama3_json":
        return LlamaParser()
    if name == "mistral":
        return MistralParser()
    return MessageParser()


def find_tool_parser(template: str) -> str:
    """The parser of a model's family, by what its chat template has."""
    if "<|channel|>" in template and "<|call|>" in template:
        return "gpt_oss"
    if HERMES_TAGS[0] in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if MistralParser.tag in template:
        return "mistral"
    has_llama_calls = '"name": function name, "parameters"' in template
    return "llama3_json" if LlamaParser.tag in template or has_llama_calls else "none"
