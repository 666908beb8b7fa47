"""Incremental detokenization: from the token ids of a sequence to text that can be shown."""

from collections.abc import Sequence

from maxtext.common.trees import common_prefix_length
from maxtext.inference.requests import ReasoningSpan
from maxtext.tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not a complete character
# Tokens before the new ones that are decoded with them: many vocabularies drop the space before the
# first word of a text.
CONTEXT = 8
MAX_CONTEXT = 64  # for texts with few boundaries: long runs of byte tokens


class Detokenizer:
    """The text of the tokens that follow a prompt, emitted as soon as it is final.

    All deltas together are `decode(prompt + tokens)` without its prefix `decode(prompt)`, up to the
    first stop string. The detokenizer holds back what later tokens can change: tokens after the
    last boundary that the tokenizer reports, spaces at the beginning of a text, and a suffix of the
    text that may be the beginning of a stop string. A character that is incomplete in the prompt
    belongs to the new text if the tokens complete it; otherwise its bytes stay with the prompt.
    Every token is decoded a bounded number of times. A visible special token splits the text: its
    name stands between the text before and the text after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool = False,
        visible_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningSpan | None = None,
    ):
        """`include_stop`: the text ends after the stop string, not before it. `visible_ids` are
        special tokens that are part of the text. Stop strings in `reasoning` have no effect.
        """
        self.tokenizer = tokenizer
        self.decode = tokenizer.decode
        self.visible_ids = visible_ids
        self.stop = [text for text in stop if text]
        self.include_stop = include_stop
        self.stop_text: str | None = None  # the one that has ended the text
        self.deltas: list[str] = []  # emitted
        self.held_back = ""  # decoded, but possibly the beginning of a stop string
        # Until the answer begins; whether the reasoning has begun.
        self.reasoning = reasoning if self.stop else None
        self.in_reasoning = reasoning is not None and not reasoning.start
        self.read_prompt(tokenizer, prompt)

    def read_prompt(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Take the context from the end of the prompt: enough tokens for a text that is not
        blank.
        """
        for size in (CONTEXT, MAX_CONTEXT, len(prompt)):
            self.is_boundary = tokenizer.boundary_detector()
            self.context: list[int] = []  # decoded tokens before `pending`
            # decode(context); blank only if no token precedes the context
            self.context_text = ""
            self.pending: list[int] = []  # not decoded yet
            self.num_final = 0  # how many of them no later token can change
            self.num_blank = 0  # how many of them are blank
            self.prompt_text = ""  # of those of the prompt, while a character is incomplete
            if not is_blank(self.decode_tokens(prompt[max(0, len(prompt) - size) :])):
                break
        if not self.decode(self.pending).endswith(REPLACEMENT):
            self.flush(everything=True)
        elif self.pending:
            _, self.prompt_text = self.decode_with_context(self.pending)

    def add(self, token_ids: Sequence[int], last: bool = False, ignore_stop: bool = False) -> str:
        """Append tokens and return the text delta: the text that is final now. With `last`, no
        token follows, so all text is final. With `ignore_stop`, stop strings begin after the text
        that is final now.
        """
        if self.stopped:
            return ""
        self.held_back += self.decode_tokens(token_ids, last)
        answer_start = self.find_answer(last)
        matches = [
            (start + len(text), start)
            for text in self.stop
            if not ignore_stop and (start := self.held_back.find(text, answer_start)) >= 0
        ]
        if matches:
            end, start = min(matches)  # the stop string that is complete first
            self.stop_text = self.held_back[start:end]
            self.held_back = self.held_back[: end if self.include_stop else start]
        length = len(self.held_back)
        if not last and not self.stopped and (not ignore_stop or self.reasoning is not None):
            length -= self.partial_stop_length()
        text_delta, self.held_back = self.held_back[:length], self.held_back[length:]
        self.deltas.append(text_delta)
        return text_delta

    def find_answer(self, last: bool) -> int:
        """The index in the text held back from which on stop strings have an effect."""
        if self.reasoning is None:
            return 0
        if not self.in_reasoning:
            text = self.held_back.lstrip()
            self.in_reasoning = text.startswith(self.reasoning.start)
            if not self.in_reasoning and (last or not self.reasoning.start.startswith(text)):
                self.reasoning = None
                return 0
        end = self.held_back.find(self.reasoning.end) if self.in_reasoning else -1
        if end < 0:
            return len(self.held_back)
        end += len(self.reasoning.end)
        self.reasoning = None
        return end

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    @property
    def holds_back(self) -> bool:
        """Whether some text is not emitted yet."""
        return bool(self.held_back or self.pending)

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        return "".join(self.deltas) + self.held_back

    def decode_tokens(self, token_ids: Sequence[int], last: bool = False) -> str:
        texts = []
        for token in token_ids:
            if token in self.visible_ids:
                texts += [self.flush(everything=True), self.tokenizer.id_to_token(int(token))]
                self.is_boundary = self.tokenizer.boundary_detector()
                continue
            self.pending.append(int(token))
            if self.is_boundary(int(token)):
                self.num_final = len(self.pending)
                if self.num_final >= CONTEXT:
                    texts.append(self.flush())
        return "".join([*texts, self.flush(everything=last)])

    def flush(self, everything: bool = False) -> str:
        """Decode the pending tokens that are final."""
        num_final = len(self.pending) if everything else self.num_final
        recent = self.pending[self.num_blank : num_final]
        if not recent and not everything:
            return ""
        recent_text = self.decode(recent)
        if is_blank(self.context_text) and is_blank(recent_text) and not everything:
            # Whether a decoder drops spaces at the beginning depends on what follows.
            self.num_blank = num_final
            return ""
        new, self.pending = self.pending[:num_final], self.pending[num_final:]
        self.num_final = self.num_blank = 0
        text, delta = self.decode_with_context(new)
        delta = delta[common_prefix_length(delta, self.prompt_text) :]
        self.prompt_text = ""
        needs_context = is_blank(self.context_text)
        if len(self.context) + len(new) <= CONTEXT or (needs_context and is_blank(recent_text)):
            self.context, self.context_text = [*self.context, *new], text
        elif not is_blank(recent_text) and (needs_context or len(recent) <= MAX_CONTEXT):
            self.context, self.context_text = recent, recent_text
        return delta

    def decode_with_context(self, token_ids: list[int]) -> tuple[str, str]:
        """The text of the context and these tokens, and what the tokens add to it."""
        text = self.decode([*self.context, *token_ids])
        if text.startswith(self.context_text):
            return text, text[len(self.context_text) :]
        return text, self.decode(token_ids)

    def partial_stop_length(self) -> int:
        """The length of the longest suffix of the text that is a proper prefix of a stop string, or
        of the tag that ends the reasoning.
        """
        if self.reasoning is not None and not self.in_reasoning:
            return len(self.held_back)  # it may begin
        stop = self.stop if self.reasoning is None else [self.reasoning.end]
        return max(
            (
                size
                for text in stop
                for size in range(1, len(text))
                if self.held_back.endswith(text[:size])
            ),
            default=0,
        )


def is_blank(text: str) -> bool:
    """Whether a text is empty or spaces only, which a decoder may drop at the beginning."""
    return not text.strip(" ")
