"""A request inside the engine, and what a step of the engine produces for it."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import jax

from maxtext.inference.sampling.bad_words import TokenMatcher
from maxtext.inference.sampling.logprobs import Logprobs, TokenLogprobs, to_host
from maxtext.inference.sampling.params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """The state of a request in the scheduler."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter_slot: int = 0  # of the model's adapters, from 1; 0: none
    adapter_version: int = 0  # unique to what a slot holds, for the prefix cache
    cache_salt: str = ""
    started_at: float = 0.0  # when it first got a slot, by time.monotonic
    token_ids: list[int] = field(init=False)  # the prompt and the sampled tokens
    # Of the tokens of the prompt, as they are computed; the first has none.
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    slot: int = -1
    blocks: list[int] = field(default_factory=list)  # its block table
    # Tokens in the KV cache once all programs in flight have run, at most. A program may have
    # finished the sequence before that, or rejected drafts.
    num_computed: int = 0
    prefill_length: int = 0  # tokens to prefill before the next one is sampled
    common_length: int = 0  # tokens that another sequence of the prefix cache also begins with
    num_in_flight: int = 0  # tokens that decode programs in flight may add, at most
    finished: bool = False
    grammar: TokenMatcher | None = None  # constrains the tokens
    in_flight: bool = False  # a program samples tokens for it, which its grammar does not know yet

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.prompt_logprobs = [] if self.params.prompt_logprobs is None else [None]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        is_wanted = self.params.prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def shares_prompt(self) -> bool:
        """Whether other choices of the same request have the same prompt."""
        return self.params.n > 1

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.prefill_length

    @property
    def cache_namespace(self) -> Hashable:
        """Sequences share cached blocks only if it is equal; falsy if nothing sets it apart."""
        return (self.adapter_version, self.cache_salt) if self.cache_salt else self.adapter_version

    @property
    def prompt_key(self) -> Hashable:
        """Sequences with an equal one have the same logits after their prompts."""
        return self.cache_namespace, self.prompt_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def awaits_grammar(self) -> bool:
        """Whether its grammar must read the tokens in flight before the next program."""
        return self.grammar is not None and self.in_flight

    @property
    def last_position(self) -> int:
        """The position of the last token that may be sampled."""
        return len(self.prompt_ids) + self.params.max_new_tokens - 1

    @property
    def min_position(self) -> int:
        """The position of the first token that may end the sequence."""
        return len(self.prompt_ids) + self.params.min_tokens

    def dispatch(self, num_tokens: int) -> None:
        """Count a decode program that adds at most `num_tokens` tokens."""
        self.in_flight = True
        self.num_in_flight += num_tokens
        self.num_computed = min(self.num_computed + num_tokens, self.last_position)

    def collect(self, num_tokens: int) -> None:
        """The tokens of a program that may have added `num_tokens` are in `token_ids`."""
        self.in_flight = False
        self.num_in_flight -= num_tokens
        computed = len(self.token_ids) - 1 + self.num_in_flight
        self.num_computed = min(computed, self.last_position)

    @property
    def num_decoded(self) -> int:
        """Tokens of the decode steps that were dispatched since its prefill, at most."""
        return self.num_computed - self.prefill_length

    @property
    def num_remaining(self) -> int:
        """Tokens for which decode steps may still be dispatched."""
        return self.last_position - self.num_computed


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step sampled for one request. `finish_reason` is None while the request is
    running, else "end", "length" or "error".
    """

    request_id: int
    sampled_tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of these tokens, if the request wants them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first output of a request
    num_cached_tokens: int = 0
    started_at: float = 0.0
    finish_reason: str | None = None
    error: str | None = None


def add_prompt_logprobs(
    sequence: Sequence, logprobs: Logprobs, index: tuple[int, int], start: int, count: int
) -> None:
    """Append the log-probabilities that a chunk of `count` tokens from position `start` on gives
    to the tokens after them. `index` is where the chunk begins in logprobs [R, C].
    """
    row, column = index
    first = len(sequence.prompt_logprobs)  # the token that has none yet
    skipped = first - 1 - start
    end = min(start + count + 1, len(sequence.prompt_ids))
    if skipped < 0 or first >= end:
        return
    chunk = jax.tree.map(lambda x: x[row, column + skipped : column + count], logprobs)
    num_top = sequence.params.prompt_logprobs or 0
    sequence.prompt_logprobs += to_host(chunk, sequence.prompt_ids[first:end], num_top)


def accepted_tokens(sequence: Sequence, tokens: list[int]) -> list[int]:
    """The tokens of a program up to the first that the grammar of the sequence does not allow. A
    negative value, which is no token, ends them and stays.
    """
    if sequence.grammar is None:
        return tokens
    count = next((index for index, token in enumerate(tokens) if token < 0), len(tokens))
    num_accepted = sequence.grammar.accept(tokens[:count])
    return tokens[:num_accepted] if num_accepted < count else tokens
