"""Tokenizes a conversation and finds the tokens that the assistant produced.

A template that marks the assistant's text with `{% generation %}` gives its characters. For any
other template, the text of assistant turn i lies between two renderings that are prefixes of the
whole: messages before i with the generation prompt, and messages up to i without. If the template
ends turns with a special token, what follows it, such as the newline after ChatML's <|im_end|>, is
not the assistant's. Otherwise the turn ends where its rendering ends.

Some templates render a turn differently when messages follow. If they only write another special
token at the end of the text, such as <|return|> of gpt-oss, the turn is the same. Most often they
drop its reasoning: then the renderings are no prefixes, and the turn is not trained on, unless it
is the last one: it starts at the first token that differs from the generation prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.trees import common_prefix_length
from maxtext.tokenizers.chat import CONTENT_MARK, ChatTemplate, Messages
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.template_process import RenderedTemplate

ASSISTANT = "assistant"
MAX_RENDERINGS = 32  # in one request: together they share the limits on time and memory
SHORT_CHAT = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": CONTENT_MARK}]
REPORTED: set[str] = set()  # sources of templates whose turns differ, which are logged once


@dataclass(frozen=True)
class TokenizedChat:
    """`ids` int32 [n], `mask` bool [n]: True for tokens of the assistant."""

    ids: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends turns: by a special token, or by text alone. `rest`: what it writes after
    the last special token.
    """

    is_special: bool = True
    rest: str = ""

    @classmethod
    def from_rendering(
        cls, rendered: RenderedTemplate | UserError, tokenizer: Tokenizer
    ) -> "TurnEnd":
        """`rendered`: the template's text of a conversation that ends with a turn CONTENT_MARK."""
        if isinstance(rendered, UserError) or CONTENT_MARK not in rendered.text:
            return cls()
        tail = Rendering.from_text(rendered.text.rpartition(CONTENT_MARK)[2], tokenizer)
        specials = np.flatnonzero(tail.special)
        if not len(specials):
            return cls(is_special=False)
        return cls(rest=tail.text[tail.ends[specials[-1]] :])


@dataclass(frozen=True)
class Rendering:
    """A whole conversation as text and tokens. `starts` and `ends` are the offsets of the tokens,
    both non-decreasing.
    """

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray
    special: np.ndarray

    @classmethod
    def from_text(cls, text: str, tokenizer: Tokenizer) -> "Rendering":
        ids, offsets = tokenizer.encode_with_offsets(text)
        flat = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
        starts, ends = flat[::2], flat[1::2]
        special = np.array([token in tokenizer.special_ids for token in ids], bool)
        return cls(
            text=text,
            ids=ids,
            starts=np.minimum.accumulate(starts[::-1])[::-1],
            ends=np.maximum.accumulate(ends),
            special=special,
        )

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """The (first, end) of the tokens that overlap the characters from `start` to `end`. A
        special token that begins earlier, as a header that strips spaces, does not count.
        """
        first = int(np.searchsorted(self.ends, start, side="right"))
        while first < len(self.ids) and self.special[first] and self.starts[first] < start:
            first += 1
        return first, int(np.searchsorted(self.starts, end, side="left"))

    def turn_span(self, before: str, through: str) -> tuple[int, int] | None:
        """The tokens between two texts, or None if these are no prefixes of the whole."""
        if not (self.text.startswith(before) and self.text.startswith(through)):
            return None
        return self.token_span(len(before), len(through))

    def end_of_turn(self, first: int, end: int, turn_end: TurnEnd) -> int:
        """The end of a turn, whose tokens are [first, end) with all that the template writes after
        its end token.
        """
        specials = np.flatnonzero(self.special[first:end])
        if not len(specials) or not turn_end.is_special:
            return end
        last = first + int(specials[-1])
        stop = self.starts[end] if end < len(self.ids) else len(self.text)
        rest = self.text[self.ends[last] : stop]
        # Otherwise the special token belongs to the content, which goes on after it.
        return last + 1 if not rest.strip() or rest == turn_end.rest else end


def tokenize_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    variables: Mapping[str, object] | None = None,
    first_turn: int = 0,
) -> TokenizedChat:
    """The tokens of a conversation and those of its assistant turns, end-of-turn token included.
    Turns of messages before `first_turn` are not masked in.

    Raises UserError if the template fails.
    """
    if template.marks_generation(variables):
        whole, spans = marked_spans(template, tokenizer, messages, variables, first_turn)
    else:
        whole, spans = prefix_spans(template, tokenizer, messages, variables, first_turn)
    mask = np.zeros(len(whole.ids), bool)
    for first, end in spans:
        mask[first:end] = True
    return TokenizedChat(np.array(whole.ids, np.int32), mask)


def marked_spans(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    variables: Mapping[str, object] | None,
    first_turn: int,
) -> tuple[Rendering, list[tuple[int, int]]]:
    """The (first, end) of the tokens that the template marks."""
    conversations = [(messages, False), (messages[:first_turn], True)]
    rendered, *prompts = template.run(conversations[: 2 if first_turn else 1], variables, True)
    rendered = expect(rendered)
    whole = Rendering.from_text(rendered.text, tokenizer)
    begin = max((common_prefix_length(expect(p).text, rendered.text) for p in prompts), default=0)
    spans = [
        whole.token_span(max(start, begin), end)
        for start, end in rendered.spans
        if max(start, begin) < end
    ]
    return whole, spans


def prefix_spans(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    variables: Mapping[str, object] | None,
    first_turn: int,
) -> tuple[Rendering, list[tuple[int, int]]]:
    """The (first, end) of the tokens of assistant turns, by two renderings for each."""
    turns = [
        index
        for index, message in enumerate(messages)
        if message.get("role") == ASSISTANT and index >= first_turn
    ]
    conversations: list[tuple[Messages, bool]] = [(SHORT_CHAT, False), (messages, False)]
    for turn in turns:
        conversations += [(messages[:turn], True), (messages[: turn + 1], False)]
    results = [
        result
        for start in range(0, len(conversations), MAX_RENDERINGS)
        for result in template.run(conversations[start : start + MAX_RENDERINGS], variables)
    ]
    turn_end = TurnEnd.from_rendering(results[0], tokenizer)
    whole = Rendering.from_text(expect(results[1]).text, tokenizer)
    spans = []
    for turn, before, through in zip(turns, results[2::2], results[3::2], strict=True):
        is_last = turn == turns[-1]
        if isinstance(before, UserError) or isinstance(through, UserError):
            error = before if isinstance(before, UserError) else through
            if is_last:
                raise UserError(
                    f"the assistant turn at message {turn} cannot be told from its prompt: {error}"
                )
            report_difference(template, turn, str(error))
            continue
        span = whole.turn_span(before.text, through.text)
        if span is None:
            through_ids = tokenizer.encode_with_specials(through.text)
            first = common_prefix_length(tokenizer.encode_with_specials(before.text), whole.ids)
            end = common_prefix_length(through_ids, whole.ids)
            continues = whole.text.startswith(before.text)
            span = first, end
            # What only the end of a text has
            rest = [token for token in through_ids[end:] if token not in tokenizer.special_ids]
            if not continues or tokenizer.decode(rest).strip():
                parts_at = end if continues else first
                token = (
                    tokenizer.id_to_token(whole.ids[parts_at]) if parts_at < len(whole.ids) else ""
                )
                reason = f"the renderings part at token {parts_at}, {token!r}"
                report_difference(template, turn, reason)
                if not is_last:
                    continue
        spans.append((span[0], whole.end_of_turn(*span, turn_end)))
    return whole, spans


def expect(result: RenderedTemplate | UserError) -> RenderedTemplate:
    if isinstance(result, UserError):
        raise result
    return result


def report_difference(template: ChatTemplate, turn: int, reason: str) -> None:
    """Log, once for a template, that a turn differs when messages follow."""
    if template.source in REPORTED:
        return
    REPORTED.add(template.source)
    LOGGER.warning(
        "the chat template of %s renders the assistant turn at message %d differently within the "
        "whole conversation (%s): such turns are not trained on, except for the last of a "
        "conversation, from the first token that differs; mark the assistant's text with "
        "{%% generation %%} to train on all turns",
        template.origin,
        turn,
        reason,
    )
