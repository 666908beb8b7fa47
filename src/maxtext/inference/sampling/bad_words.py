"""Sequences of tokens that a completion may not have, with or without a grammar.

A `BadWordsMatcher` has the interface of a `GrammarMatcher`: a program samples its first token under
the mask of the host, and the host keeps the tokens up to the first that is not allowed. Requests
without bad words run the same programs as before.
"""

import copy
from collections.abc import Iterable, Sequence

import numpy as np

from maxtext.inference.sampling.grammar import WORD_BITS, GrammarMatcher, fill_masks
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import Tokenizer

TokenIds = tuple[int, ...]


def tokenize_bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[TokenIds, ...]:
    """The token sequences of words, as in vLLM: of each word at the beginning of a text, and of the
    word after a space if that has as many tokens and another first one.
    """
    sequences: list[TokenIds] = []
    for word in words:
        text = word.lstrip() or word
        bare, spaced = (
            tuple(tokenizer.encode_with_specials(prefix + text)) for prefix in ("", " ")
        )
        if not bare:
            raise RequestError(f"bad_words has {word[:60]!r}, which has no tokens", "bad_words")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


class BadWordsMatcher:
    """Allows every token that does not complete one of `sequences` in the completion, and that
    `grammar` and `allowed_ids` allow, where they are given.
    """

    def __init__(
        self,
        sequences: Sequence[TokenIds],
        vocab_size: int,
        allowed_ids: Iterable[int] | None = None,
        grammar: GrammarMatcher | None = None,
    ):
        self.sequences = sequences
        self.vocab_size = vocab_size
        self.allowed_ids = None if allowed_ids is None else frozenset(allowed_ids)
        self.grammar = grammar
        self.by_last: dict[int, list[TokenIds]] = {}  # the tokens before each last token
        for sequence in sequences:
            if max(sequence) >= vocab_size:  # the model does not sample all of its tokens
                continue
            self.by_last.setdefault(sequence[-1], []).append(sequence[:-1])
        self.max_recent = max((len(sequence) - 1 for sequence in sequences), default=0)
        self.recent: TokenIds = ()  # the newest tokens of the completion

    def copy(self) -> "BadWordsMatcher":
        copied = copy.copy(self)
        copied.grammar = self.grammar and self.grammar.copy()
        return copied

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-self.vocab_size // WORD_BITS)

    def excluded_ids(self) -> list[int]:
        """The tokens that would complete a sequence now."""
        return [
            token
            for token, prefixes in self.by_last.items()
            if any(ends_with(self.recent, prefix) for prefix in prefixes)
        ]

    def restrict(self, mask: np.ndarray) -> None:
        """Clear the bits of excluded tokens in a mask, uint32 [W]."""
        for token in self.excluded_ids():
            mask[token // WORD_BITS] &= np.uint32(~(1 << token % WORD_BITS) & 0xFFFFFFFF)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Append the longest beginning of these tokens that is allowed; returns its length."""
        recent, count = self.recent, 0
        history = [recent]
        for token in token_ids:
            is_allowed = self.allowed_ids is None or token in self.allowed_ids
            completes = (ends_with(recent, prefix) for prefix in self.by_last.get(token, ()))
            if not is_allowed or any(completes):
                break
            count += 1
            recent = (*recent, token)[-self.max_recent :] if self.max_recent else ()
            history.append(recent)
        if self.grammar is not None:
            count = self.grammar.accept(token_ids[:count])
        self.recent = history[count]
        return count

    @property
    def is_complete(self) -> bool:
        return self.grammar is not None and self.grammar.is_complete

    @property
    def error(self) -> str:
        return "" if self.grammar is None else self.grammar.error


def ends_with(tokens: TokenIds, suffix: TokenIds) -> bool:
    return not suffix or (tokens[-1:] == suffix[-1:] and tokens[-len(suffix) :] == suffix)


TokenMatcher = GrammarMatcher | BadWordsMatcher


def fill_token_masks(
    matchers: Sequence[TokenMatcher], rows: Sequence[int], masks: np.ndarray
) -> None:
    """Write which tokens may follow each matcher into its row of masks, uint32 [B, W], in which all
    bits are set.
    """
    grammars = [
        (matcher.grammar if isinstance(matcher, BadWordsMatcher) else matcher, row)
        for matcher, row in zip(matchers, rows, strict=True)
    ]
    with_grammar = [(grammar, row) for grammar, row in grammars if grammar is not None]
    if with_grammar:
        fill_masks([grammar for grammar, _ in with_grammar], [r for _, r in with_grammar], masks)
    for matcher, row in zip(matchers, rows, strict=True):
        if isinstance(matcher, BadWordsMatcher):
            matcher.restrict(masks[row])


def build_matcher(
    params: SamplingParams,
    grammar: GrammarMatcher | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> TokenMatcher | None:
    """The matcher that constrains the tokens of a request on the host, or None. Raises
    RequestError if a bad word has no tokens.
    """
    allowed_ids = params.allowed_token_ids
    if not params.bad_words and (grammar is None or allowed_ids is None):
        return grammar
    sequences: tuple[TokenIds, ...] = ()
    if params.bad_words:
        if tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this model has none", "bad_words")
        sequences = tokenize_bad_words(params.bad_words, tokenizer)
    return BadWordsMatcher(sequences, vocab_size, allowed_ids=allowed_ids, grammar=grammar)
