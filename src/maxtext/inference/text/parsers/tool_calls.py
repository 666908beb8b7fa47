"""Tool calls in the text of a completion, in the forms that model families write.

What cannot be parsed as a call is content.
"""

import re

from maxtext.inference.text.parsers.call_readers import (
    GLM_SYNTAX,
    INVOKE_SYNTAX,
    ArgumentsReader,
    CallReader,
    JsonCallReader,
    ObjectCallReader,
    ObjectReader,
    ReaderFactory,
    Schemas,
    XmlCallReader,
)
from maxtext.inference.text.parsers.message_parser import (
    MessageDelta,
    MessageParser,
    partial_length,
)

MISTRAL_CALL = re.compile(r"\s*([^\s\[\]{}\"]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


class TaggedCallParser(MessageParser):
    """Calls between two tags, each read by a new reader."""

    def __init__(self, start: str, end: str, new_reader: ReaderFactory):
        self.start = start
        self.end = end
        self.new_reader = new_reader
        self.reader: CallReader | None = None  # of the call that is open
        self.text = ""
        self.num_calls = 0
        self.follows_call = False  # the text begins after a call

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        while self.reader is not None or self.start in self.text:
            if self.reader is None:
                content, _, self.text = self.text.partition(self.start)
                deltas += self.content(content)
                self.reader = self.new_reader(self.num_calls)
            inner, self.text, is_closed = self.reader.split(self.text, self.end, last)
            deltas += self.reader.add(inner)
            if not is_closed and not last:
                return deltas
            deltas += self.close(self.reader, is_closed)
        ready = len(self.text) - (0 if last else partial_length(self.text, self.start))
        if self.follows_call and not self.text[:ready].strip() and not last:
            return deltas  # blanks, which may separate calls
        deltas += self.content(self.text[:ready])
        self.text = self.text[ready:]
        return deltas

    def content(self, text: str) -> list[MessageDelta]:
        """Templates separate calls by line breaks, which are no content."""
        is_content = bool(text.strip() if self.follows_call else text)
        self.follows_call = self.follows_call and not is_content
        return [MessageDelta(content=text)] if is_content else []

    def close(self, reader: CallReader, is_closed: bool) -> list[MessageDelta]:
        self.reader = None
        deltas = reader.finish(is_closed)
        if reader.is_call:
            self.num_calls += reader.num_calls
            self.follows_call = True
            return deltas
        return self.content(self.start + reader.text + (self.end if is_closed else ""))


class NestedCallsReader(CallReader):
    """Several calls between the tags of one, each with tags of its own. After the first call, other
    text between them is dropped.
    """

    def __init__(self, index: int, start: str, end: str, new_reader: ReaderFactory):
        super().__init__(index)
        self.parser = TaggedCallParser(start, end, lambda inner: new_reader(index + inner))

    @property
    def num_calls(self) -> int:
        return self.parser.num_calls

    def add(self, text: str) -> list[MessageDelta]:
        self.text += text
        return self.calls(self.parser.add(text, last=False))

    def finish(self, is_closed: bool) -> list[MessageDelta]:
        return self.calls(self.parser.add("", last=True))

    def calls(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        deltas = [delta for delta in deltas if delta.index is not None]
        self.is_call = self.is_call or bool(deltas)
        return deltas


class UntaggedCallParser(MessageParser):
    """Calls that end with a JSON object. After text that is no call, everything is content."""

    def __init__(self) -> None:
        self.text = ""  # that no reader has read
        self.prefix = ""  # before the text of the reader
        self.reader: ObjectReader | None = None  # of the call that is open
        self.num_calls = 0
        self.is_content = False

    def read(self, last: bool) -> list[MessageDelta]:
        """Give the text to the reader; it is None after that if the call has ended."""
        reader = self.reader
        assert reader is not None
        deltas = reader.add(self.text)
        self.text = ""
        if not reader.has_ended and not last:
            return deltas
        deltas += reader.finish(reader.scanner.is_complete)
        self.reader = None
        self.num_calls += reader.is_call
        self.text = reader.rest if reader.is_call else self.prefix + reader.text + reader.rest
        self.is_content = not reader.is_call
        return deltas


class LlamaParser(UntaggedCallParser):
    """The message is calls {"name": ..., "parameters": {...}}, separated by semicolons, maybe after
    <|python_tag|>. A message that begins otherwise has no calls.
    """

    tag = "<|python_tag|>"

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        while not self.is_content and (self.text or self.reader is not None):
            if self.reader is None and not self.begin_call(last):
                break
            deltas += self.read(last)
            if self.reader is not None:
                break
        if self.is_content and self.text:
            deltas.append(MessageDelta(content=self.text))
            self.text = ""
        return deltas

    def begin_call(self, last: bool) -> bool:
        """Whether the text begins with an object, of which a reader is ready; without one and
        without what may become one, the rest is content.
        """
        rest = self.text.lstrip()
        may_begin = self.tag.startswith(rest) and not last
        rest = rest.removeprefix(self.tag).lstrip()
        rest = rest.lstrip("; \n") if self.num_calls else rest
        if may_begin or (not rest and not last):
            return False
        if not rest.startswith("{"):  # blanks after calls are no content
            self.is_content = bool(self.text.strip()) or not self.num_calls
            return False
        self.prefix, self.text = self.text[: len(self.text) - len(rest)], rest
        self.reader = ObjectCallReader(self.num_calls)
        return True


class MistralParser(UntaggedCallParser):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or for each call
    [TOOL_CALLS]name[ARGS]{...}.
    """

    tag = "[TOOL_CALLS]"

    def __init__(self) -> None:
        super().__init__()
        self.in_calls = False
        self.in_list = False

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
        while not self.is_content and (self.reader is not None or self.begin_call()):
            deltas += self.read(last)
            if self.reader is not None:
                break
        if last and self.text.strip():
            self.is_content = True
        if self.is_content and self.text:
            deltas.append(MessageDelta(content=self.text))
            self.text = ""
        return deltas

    def begin_call(self) -> bool:
        """Whether the text begins with a call, of which a reader is ready."""
        rest = self.text.lstrip()
        if self.in_list:
            rest = rest.removeprefix(",").lstrip()
            if rest.startswith("]"):
                self.in_list, self.text = False, rest[1:]
                return self.begin_call()
        else:
            rest = rest.removeprefix(self.tag).lstrip()
        is_list = self.in_list
        if not is_list and rest.startswith("[") and rest[1:].lstrip().startswith("{"):
            is_list, rest = True, rest[1:].lstrip()
        match = None if is_list else MISTRAL_CALL.match(rest)
        if match is not None:
            self.reader = ArgumentsReader(self.num_calls, match[1])
            rest = rest[match.end() :]
        elif is_list and rest.startswith("{"):
            self.in_list = True
            self.reader = ObjectCallReader(self.num_calls)
        else:
            return False
        self.prefix, self.text = self.text[: len(self.text) - len(rest)], rest
        return True


HERMES_TAGS = ("<tool_call>", "</tool_call>")
SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
MINIMAX_TAGS = ("<minimax:tool_call>", "</minimax:tool_call>")
# Special tokens that a parser must see in the text, by its name.
PARSER_TAGS: dict[str, tuple[str, ...]] = {
    "hermes": HERMES_TAGS,
    "llama3_json": (LlamaParser.tag,),
    "mistral": (MistralParser.tag, "[ARGS]", "[CALL_ID]"),
    "qwen3_coder": HERMES_TAGS,
    "glm45": (*HERMES_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": MINIMAX_TAGS,
    "seed_oss": SEED_TAGS,
    "harmony": (),  # the tags are those of the reasoning parser, which reads calls
    "none": (),
}
TOOL_PARSERS = tuple(PARSER_TAGS)


def build_tool_parser(name: str, schemas: Schemas) -> MessageParser:
    """A new parser for one message, by a name of TOOL_PARSERS. With `none` and `harmony`, all text
    is content: the reasoning parser of harmony reads its calls. Raises ValueError for other names.
    """
    if name == "hermes":
        return TaggedCallParser(*HERMES_TAGS, JsonCallReader)
    if name == "qwen3_coder":
        return TaggedCallParser(*HERMES_TAGS, lambda index: XmlCallReader(index, schemas))
    if name == "seed_oss":
        return TaggedCallParser(*SEED_TAGS, lambda index: XmlCallReader(index, schemas))
    if name == "glm45":
        return TaggedCallParser(
            *HERMES_TAGS, lambda index: XmlCallReader(index, schemas, GLM_SYNTAX)
        )
    if name == "minimax_m2":
        return TaggedCallParser(
            *MINIMAX_TAGS,
            lambda index: NestedCallsReader(
                index,
                "<invoke",
                "</invoke>",
                lambda inner: XmlCallReader(inner, schemas, INVOKE_SYNTAX),
            ),
        )
    if name == "llama3_json":
        return LlamaParser()
    if name == "mistral":
        return MistralParser()
    if name in ("harmony", "none"):
        return MessageParser()
    raise ValueError(f"no tool parser is called {name!r}: the names are {', '.join(TOOL_PARSERS)}")


def find_tool_parser(template: str) -> str:
    """The parser of a model's family, by what its chat template has."""
    if "<|channel|>" in template and "<|call|>" in template:
        return "harmony"
    if SEED_TAGS[0] in template:
        return "seed_oss"
    if MINIMAX_TAGS[0] in template:
        return "minimax_m2"
    if HERMES_TAGS[0] in template and "<arg_key>" in template:
        return "glm45"
    if HERMES_TAGS[0] in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if MistralParser.tag in template:
        return "mistral"
    has_llama_calls = '"name": function name, "parameters"' in template
    return "llama3_json" if LlamaParser.tag in template or has_llama_calls else "none"
