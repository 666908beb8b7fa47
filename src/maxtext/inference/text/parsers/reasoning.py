"""Reasoning that precedes the answer in a completion, in the forms that families of models write.

`think`: <think>reasoning</think>answer, where the chat template may have written <think> already.
`seed_oss`: the same with the tags <seed:think> and </seed:think>.
`harmony`: the channels of gpt-oss conversations, <|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>final<|message|>answer, with calls in the channel commentary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from maxtext.inference.requests import ReasoningSpan
from maxtext.inference.text.parsers.call_readers import ArgumentsReader
from maxtext.inference.text.parsers.message_parser import (
    MessageDelta,
    MessageParser,
    ParserChain,
    partial_length,
)
from maxtext.tokenizers import Tokenizer

# The tags of a parser that reads reasoning before the answer, by its name.
THINK_TAGS = {"think": ("<think>", "</think>"), "seed_oss": ("<seed:think>", "</seed:think>")}
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
HARMONY_TAGS = (CHANNEL, MESSAGE, START, CONSTRAIN, END, CALL, RETURN)
HARMONY_SPLIT = re.compile("|".join(map(re.escape, HARMONY_TAGS)))
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
# Special tokens that a parser must see in the text, by its name.
PARSER_TAGS: dict[str, tuple[str, ...]] = {
    **THINK_TAGS,
    "harmony": HARMONY_TAGS,
    "none": (),
}
REASONING_PARSERS = tuple(PARSER_TAGS)


class ThinkParser(MessageParser):
    """Text between the tags is reasoning, if the text begins with it. Line breaks next to the tags
    belong to neither reasoning nor answer.
    """

    def __init__(self, start: str, end: str, starts_inside: bool):
        self.start = start
        self.end = end
        self.text = ""
        self.state = "inside" if starts_inside else "undecided"
        self.is_first = True  # nothing of the reasoning, or of the answer after it, has come

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        if self.state == "undecided":
            begins = self.text.lstrip()
            if begins.startswith(self.start):
                self.state, self.text = "inside", begins.removeprefix(self.start)
            elif last or not self.start.startswith(begins):
                self.state, self.is_first = "outside", False
            else:
                return []
        if self.state == "inside":
            deltas += self.take_reasoning(last)
        if self.state == "outside":
            content = self.text.lstrip("\n") if self.is_first else self.text
            self.text = ""
            if content:
                self.is_first = False
                deltas.append(MessageDelta(content=content))
        return deltas

    def take_reasoning(self, last: bool) -> list[MessageDelta]:
        if self.is_first:
            self.text = self.text.lstrip("\n")
        end = self.text.find(self.end)
        if end >= 0:
            reasoning, self.text = self.text[:end], self.text[end + len(self.end) :]
            self.state, self.is_first = "outside", True
        else:
            pending = 0 if last else partial_length(self.text, self.end)
            reasoning = self.text[: len(self.text) - pending].rstrip("\n")
            self.text = self.text[len(reasoning) :]
        reasoning = reasoning.rstrip("\n") if end >= 0 or last else reasoning
        if reasoning and self.state == "inside":
            self.is_first = False
        return [MessageDelta(reasoning=reasoning)] if reasoning else []


class HarmonyParser(MessageParser):
    """Messages of the harmony format. The channel analysis is reasoning, a message to a function is
    a call if `with_calls`, and the rest is content.
    """

    def __init__(self, with_calls: bool):
        self.with_calls = with_calls
        self.text = ""
        self.header: str | None = None  # of the next message, while it is incomplete
        self.channel = "final"
        self.call: ArgumentsReader | None = None  # that the message is
        self.num_calls = 0

    def add(self, text: str, last: bool) -> list[MessageDelta]:
        self.text += text
        deltas: list[MessageDelta] = []
        while match := HARMONY_SPLIT.search(self.text):
            deltas += self.body(self.text[: match.start()])
            deltas += self.tag(match[0])
            self.text = self.text[match.end() :]
        pending = 0 if last else max(partial_length(self.text, tag) for tag in HARMONY_TAGS)
        ready = len(self.text) - pending
        deltas += self.body(self.text[:ready])
        self.text = self.text[ready:]
        return [*deltas, *self.end_message()] if last else deltas

    def body(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        if self.header is not None:
            self.header += text
            return []
        if self.call is not None:
            return self.call.add(text)
        is_reasoning = self.channel == "analysis"
        return [MessageDelta(reasoning=text) if is_reasoning else MessageDelta(content=text)]

    def tag(self, tag: str) -> list[MessageDelta]:
        if tag == MESSAGE and self.header is not None:
            recipient = RECIPIENT.search(self.header)
            channel = self.header.partition(CHANNEL)[2].split()
            self.channel = channel[0] if channel else "final"
            self.call = None
            if recipient is not None and self.with_calls:
                self.call = ArgumentsReader(self.num_calls, recipient[1])
            self.header = None
            return []
        if tag in (CHANNEL, START):
            deltas = self.end_message() if self.header is None else []
            self.header = (self.header or "") + tag
            return deltas
        if tag == CONSTRAIN:
            self.header = None if self.header is None else self.header + " "
            return []
        return self.end_message()

    def end_message(self) -> list[MessageDelta]:
        """The text of the message, if it was to be a call and is none."""
        call, self.call = self.call, None
        if call is None:
            return []
        self.num_calls += call.is_call
        content = "" if call.is_call else call.text + call.rest
        return [MessageDelta(content=content)] if content else []


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of the completions of one request."""

    parser: str = "none"  # of REASONING_PARSERS
    starts_inside: bool = False  # the prompt ends with the tag at the start of reasoning
    is_over: bool = False  # the prompt ends with the tag at its end
    is_wanted: bool = False  # the request asks for it

    @classmethod
    def from_prompt(
        cls, parser: str, prompt: str, continues: bool = False, is_wanted: bool = False
    ) -> "Reasoning":
        """`prompt` is the text that the chat template wrote; `continues`: it ends with a message
        that the completion continues.
        """
        if parser not in THINK_TAGS:
            return cls(parser, is_wanted=is_wanted)
        start_tag, end_tag = THINK_TAGS[parser]
        start, end = prompt.rfind(start_tag), prompt.rfind(end_tag)
        is_blank = not prompt[start + len(start_tag) :].strip()
        is_open = start > end and (continues or is_blank)
        is_over = end > start and not prompt[end + len(end_tag) :].strip()
        return cls(parser, starts_inside=is_open, is_over=is_over, is_wanted=is_wanted)

    def build_parser(self, calls: MessageParser, with_channel_calls: bool = False) -> MessageParser:
        """A new parser for one message: what is no reasoning is the text of `calls`.
        `with_channel_calls`: calls in harmony channels are calls.
        """
        if self.parser == "harmony":
            return ParserChain(HarmonyParser(with_channel_calls), calls)
        is_off = self.parser == "none" or self.is_over
        if is_off:
            return calls
        return ParserChain(ThinkParser(*THINK_TAGS[self.parser], self.starts_inside), calls)

    @property
    def span(self) -> ReasoningSpan | None:
        """For stop strings, which act in the answer alone."""
        if self.parser == "harmony":
            return ReasoningSpan("", FINAL)
        if self.parser == "none" or self.is_over:
            return None
        start, end = THINK_TAGS[self.parser]
        return ReasoningSpan("" if self.starts_inside else start, end)

    def preamble(self, tokenizer: Tokenizer) -> str:
        """The text that may precede a grammar, as the right side of a rule in Lark syntax; empty if
        there is none.

        Where the model itself decides whether it reasons, it may do so only if the request asks for
        it: a mask that allows for little else than <think> would make any model reason.
        """

        def tag(text: str) -> str:
            ids = tokenizer.encode_with_specials(text)
            is_special = len(ids) == 1 and ids[0] in tokenizer.special_ids
            return f"<[{ids[0]}]>" if is_special else f'"{text}"'

        if self.parser == "harmony":
            analysis = (
                f'{tag(CHANNEL)} "analysis" {tag(MESSAGE)} /(.|\\n)*/ {tag(END)} '
                f'{tag(START)} "assistant"'
            )
            return f'({analysis})? {tag(CHANNEL)} "final" {tag(MESSAGE)}'
        is_free = not self.starts_inside and not self.is_wanted
        if self.parser == "none" or self.is_over or is_free:
            return ""
        start_tag, end_tag = THINK_TAGS[self.parser]
        end = tag(end_tag)
        body = f"/(.|\\n)*/ {end}" if end.startswith("<[") else "reasoning"
        rule = "" if body != "reasoning" else f"\nreasoning[suffix={end}]: /(.|\\n)*/"
        if self.starts_inside:
            return f"{body} /\\n*/{rule}"
        return f"(/\\n*/ {tag(start_tag)} {body} /\\n*/)?{rule}"

    @property
    def tags(self) -> tuple[str, ...]:
        """Special tokens that the parser must see in the text."""
        return () if self.is_over else PARSER_TAGS[self.parser]

    def count_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """How many tokens of a completion are reasoning, without tags."""
        if self.span is None:
            return 0
        start_text, end_text = self.span.start, self.span.end
        if self.parser == "harmony":
            start_text, end_text = f"{CHANNEL}analysis{MESSAGE}", END
        ids = list(token_ids)
        first = 0
        if start_text:
            start = tokenizer.encode_with_specials(start_text)
            index = find_sublist(ids, start)
            if index < 0 or tokenizer.decode(ids[:index]).strip():
                return 0
            first = index + len(start)
        end = find_sublist(ids[first:], tokenizer.encode_with_specials(end_text))
        return end if end >= 0 else len(ids) - first


def find_sublist(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """The index of `wanted` in `ids`; -1 if they do not contain it."""
    width = len(wanted)
    starts = range(len(ids) - width + 1)
    return next((start for start in starts if list(ids[start : start + width]) == wanted), -1)


def find_reasoning_parser(template: str) -> str:
    """The parser of a model's family, by the tags in its chat template."""
    if CHANNEL in template:
        return "harmony"
    return next((name for name, (_, end) in THINK_TAGS.items() if end in template), "none")
