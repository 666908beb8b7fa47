"""Text around the engine, which knows ids alone: what is asked, what is answered, and text that
flows with tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from maxtext.inference.sampling import GREEDILY, Sampling
from maxtext.tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character
# Ids before the new ones that are decoded with them: many vocabularies drop the space before the
# first word of a text.
CONTEXT = 8
MAX_CONTEXT = 64  # for texts that cannot be cut more often: long runs of byte tokens


@dataclass(frozen=True)
class Ask:
    """A prompt, as text or ids, and what shall follow it."""

    prompt: str | Sequence[int]
    max_new_tokens: int = 64
    sampling: Sampling = GREEDILY
    seed: int = 0
    stop: tuple[str, ...] = ()  # the answer ends before the first of these texts
    ignore_eos: bool = False
    log_probs: bool = False


@dataclass(frozen=True)
class Answer:
    """What followed the ask of that index. `finished`: end (the model's own), stop (a text), length
    or error.
    """

    index: int
    ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finished: str
    error: str | None = None
    log_probs: tuple[float, ...] = ()  # of each id, by the model's own scores, if asked for


class Text:
    """The text of new tokens that follow a prompt, emitted as soon as it is final.

    All parts together are `decode(prompt + tokens)` without its prefix `decode(prompt)`, up to the
    first stop text. The stream holds back what later tokens can change: tokens after the last
    boundary that the tokenizer reports, spaces at the beginning of a text, and an end of the text
    that may be the beginning of a stop text. If the prompt ends inside a character, its last tokens
    belong to the new text. Each token is decoded a bounded number of times.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self.decode = tokenizer.decode
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self.parts: list[str] = []  # emitted
        self.rest = ""  # decoded, but possibly the beginning of a stop text
        self.read_prompt(tokenizer, prompt)

    def read_prompt(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Take the context from the end of a prompt: enough tokens for a text that is not blank."""
        for size in (CONTEXT, MAX_CONTEXT, len(prompt)):
            self.is_boundary = tokenizer.boundary_detector()
            self.context: list[int] = []  # decoded tokens before `pending`
            # decode(context); blank only if the context is all that precedes `pending`
            self.context_text = ""
            self.pending: list[int] = []  # not decoded yet
            self.final = 0  # how many of them no later token can change
            self.blank = 0  # how many of them are blank
            if not is_blank(self.decode_new(prompt[max(0, len(prompt) - size) :])):
                break
        if not self.decode(self.pending).endswith(REPLACEMENT):
            self.flush(everything=True)

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that is final now; with `last`, since no token follows, all of it."""
        if self.stopped:
            return ""
        self.rest += self.decode_new(tokens, last)
        matches = [
            (start + len(stop), start)
            for stop in self.stops
            if (start := self.rest.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)  # the stop text that is complete first
            self.stopped, self.rest = True, self.rest[:start]
        certain = len(self.rest) if last or self.stopped else len(self.rest) - self.possible_stop()
        part, self.rest = self.rest[:certain], self.rest[certain:]
        self.parts.append(part)
        return part

    @property
    def whole(self) -> str:
        """All the text so far, up to a stop text."""
        return "".join(self.parts) + self.rest

    def decode_new(self, tokens: Sequence[int], last: bool = False) -> str:
        parts = []
        for token in tokens:
            self.pending.append(int(token))
            if self.is_boundary(int(token)):
                self.final = len(self.pending)
                if self.final >= CONTEXT:
                    parts.append(self.flush())
        return "".join([*parts, self.flush(everything=last)])

    def flush(self, everything: bool = False) -> str:
        """The text of the pending tokens that are final."""
        final = len(self.pending) if everything else self.final
        recent = self.pending[self.blank : final]
        if not recent and not everything:
            return ""
        recent_text = self.decode(recent)
        if is_blank(self.context_text) and is_blank(recent_text) and not everything:
            # Whether a decoder drops spaces at the beginning depends on what follows.
            self.blank = final
            return ""
        new, self.pending = self.pending[:final], self.pending[final:]
        self.final = self.blank = 0
        text = self.decode([*self.context, *new])
        follows = text.startswith(self.context_text)
        part = text[len(self.context_text) :] if follows else self.decode(new)
        needs_context = is_blank(self.context_text)
        if len(self.context) + len(new) <= CONTEXT or (needs_context and is_blank(recent_text)):
            self.context, self.context_text = [*self.context, *new], text
        elif not is_blank(recent_text) and (needs_context or len(recent) <= MAX_CONTEXT):
            self.context, self.context_text = recent, recent_text
        return part

    def possible_stop(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop text."""
        return max(
            (
                size
                for stop in self.stops
                for size in range(1, len(stop))
                if self.rest.endswith(stop[:size])
            ),
            default=0,
        )


def is_blank(text: str) -> bool:
    """Whether a decoder may take a text for the beginning: nothing, or spaces alone."""
    return not text.strip(" ")
