"""Text around the engine, which knows ids alone: what is asked, what is answered, and text that flows with tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxtext.inference.sampling import GREEDILY, Sampling
from maxtext.tokenizers import Tokenizer

BROKEN_CHARACTER = "�"  # what a tokenizer writes for bytes that are not a whole character, or not yet
CONTEXT = (
    8  # tokens before the new ones that are decoded with them, since what a token says may depend on its neighbours
)


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
    """What followed the ask of that index. `finished`: end (the model's own), stop (a text), length or error."""

    index: int
    ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finished: str
    error: str | None = None
    log_probs: tuple[float, ...] = ()  # of each id, by the model's own scores, if asked for


class Text:
    """Text of new tokens behind a prompt, told as soon as it is certain.

    A token may be part of a character, and the end of the text may be the beginning of a stop: both are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.ids = list(prompt[-CONTEXT:])
        self.base, self.read = 0, len(self.ids)  # text of ids[base:read] is written already
        self.whole, self.told = "", 0
        self.stopped = False

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """What can be told now; `last`: nothing follows, so all of it."""
        if self.stopped:
            return ""
        self.ids += tokens
        before = self.tokenizer.decode(self.ids[self.base : self.read])
        after = self.tokenizer.decode(self.ids[self.base :])
        if last or not after.endswith(BROKEN_CHARACTER) or len(self.ids) - self.read > CONTEXT:
            # In many vocabularies a word's token alone has lost its space: what it adds to the text before counts.
            fits = after.startswith(before)
            self.whole += after[len(before) :] if fits else self.tokenizer.decode(self.ids[self.read :])
            self.base, self.read = max(0, len(self.ids) - CONTEXT), len(self.ids)
        start = max(0, self.told - max(map(len, self.stops), default=0))
        places = [place for stop in self.stops if (place := self.whole.find(stop, start)) >= 0]
        if places:
            self.stopped, self.whole = True, self.whole[: min(places)]
        certain = len(self.whole) if last or self.stopped else len(self.whole) - self.possible_stop()
        piece, self.told = self.whole[self.told : certain], max(self.told, certain)
        return piece

    def possible_stop(self) -> int:
        """How long the longest end of the text is that a stop begins with."""
        return max(
            (size for stop in self.stops for size in range(1, len(stop)) if self.whole.endswith(stop[:size])),
            default=0,
        )
