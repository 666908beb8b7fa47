"""How the tokens of one request are sampled, and when generation stops."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.inference.sampling.logprobs import MAX_LOGPROBS
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.inference.validation import (
    RequestError,
    check_bool,
    check_logit_bias,
    check_number,
    check_range,
    check_texts,
    check_token_ids,
    check_whole_number,
)

MAX_TEMPERATURE = 1e30  # representable in float32
MAX_N = 128
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
MAX_BIAS = 100.0
MAX_STOP_TEXTS, MAX_STOP_LENGTH = 64, 1024
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1024, 1 << 15  # of all of them
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 18


class SamplingMode(IntEnum):
    """Kinds of sampling that a program is compiled for, in increasing order of cost."""

    GREEDY = 0
    CATEGORICAL = 1
    TRUNCATED = 2


class TokenArrays(NamedTuple):
    """The fields of a request that may have many tokens, as NumPy arrays. Ids are int32; larger
    ids, which no vocabulary has, become the largest int32.
    """

    biased: np.ndarray
    biases: np.ndarray  # float32, one per biased token
    allowed: np.ndarray | None


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when generation stops. The constructor raises
    RequestError for a value of the wrong type or out of range.

    The logits l of the next token are processed in this order:

    1. `logit_bias`: l[t] + logit_bias[t].
    2. `repetition_penalty` r, for tokens of the prompt and the completion: l / r where l > 0, else
       l * r.
    3. `frequency_penalty` f and `presence_penalty` p, with the count c of a token in the
       completion: l - f c - p [c > 0].
    4. Until the completion has `min_tokens` tokens, tokens that would end it are excluded.
    5. With `allowed_token_ids`, all other tokens are excluded.
    6. With `bad_words`, tokens are excluded that would complete one of these strings in the
       completion, at the beginning of a text or after a space.
    7. With `structured_outputs`, tokens that its grammar does not allow are excluded.

    Then a token is sampled from softmax(l / temperature). It is restricted to

    - the `top_k` most likely tokens; 0, -1 and numbers above the vocabulary size: all,
    - of these, the smallest set of most likely tokens whose probabilities sum to at least `top_p`,
    - and tokens with at least `min_p` times the probability of the most likely one.

    Tokens that tie with the last token of a set belong to the set. With `temperature` 0, the most
    likely token is taken, and these three fields have no effect.

    A token depends on `seed`, its position and its own sequence, not on the rest of the batch. With
    `n`, a request has n completions: the first uses the seed itself, and the others use seeds
    derived from it. Generation stops

    - after `max_new_tokens` tokens,
    - with a token of `stop_token_ids`,
    - with the model's end-of-sequence token, unless `ignore_eos`,
    - before the first string of `stop` that appears; after it, with `include_stop_str_in_output`.

    With `logprobs` k, the completion also has the log-probability of every token, and of the k most
    likely tokens at its position, under the unmodified logits. `prompt_logprobs` returns the same
    for the tokens of the prompt; max_new_tokens may then be 0. Special tokens are not part of the
    text unless `skip_special_tokens` is false.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestError for the first field with an invalid value."""
        check_range("temperature", self.temperature, 0, MAX_TEMPERATURE)
        check_whole_number("top_k", self.top_k)
        if self.top_k < -1:
            raise RequestError(
                f"top_k={str(self.top_k)[:60]} must be at least 0; 0 and -1 disable it",
                "top_k",
            )
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(
                f"top_p={str(self.top_p)[:60]} must be above 0 and at most 1", "top_p"
            )
        check_range("min_p", self.min_p, 0, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            check_range(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        limit = MAX_REPETITION_PENALTY
        check_range("repetition_penalty", self.repetition_penalty, 1 / limit, limit)
        check_whole_number("seed", self.seed)
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed={str(self.seed)[:60]} has more than 64 bits", "seed")
        check_range("min_tokens", self.min_tokens, 0, math.inf, whole=True)
        check_range("n", self.n, 1, MAX_N, whole=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, MAX_LOGPROBS, whole=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        stop = check_texts("stop", self.stop, MAX_STOP_TEXTS, MAX_STOP_LENGTH)
        object.__setattr__(self, "stop", stop)
        ids = check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        object.__setattr__(self, "stop_token_ids", ids)
        words = check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH)
        if (size := sum(map(len, words))) > MAX_BAD_CHARACTERS:
            raise RequestError(
                f"bad_words has {size} characters: at most {MAX_BAD_CHARACTERS} are allowed",
                "bad_words",
            )
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            ids = check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not ids:
                raise RequestError(
                    "allowed_token_ids is empty: name at least one token, or leave it out",
                    "allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.structured_outputs is not None:
            constraint = StructuredOutputs.parse(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", constraint)
        biases = check_logit_bias("logit_bias", self.logit_bias, MAX_BIAS)
        object.__setattr__(self, "logit_bias", biases)

    @classmethod
    def from_config(cls, config: MaxTextConfig, **overrides: Any) -> "SamplingParams":
        """The parameters that the decode_sampling_* keys set; `overrides` are further fields."""
        strategy = config.decode_sampling_strategy.value
        if strategy == "greedy":
            return cls(**overrides)
        top_k = config.decode_sampling_top_k if strategy in ("topk", "composite") else 0
        top_p = (
            float(config.decode_sampling_nucleus_p) if strategy in ("nucleus", "composite") else 1.0
        )
        temperature = config.decode_sampling_temperature
        return cls(temperature=temperature, top_k=top_k, top_p=top_p, **overrides)

    def with_valid(self, **fields: Any) -> "SamplingParams":
        """A copy with other values for some fields, which must be valid: no field is checked again,
        since fields may have many tokens.
        """
        if self.logit_bias or self.allowed_token_ids:
            _ = self.token_arrays  # which the copy shares
        params = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(params, name, value)
        return params

    @cached_property
    def token_arrays(self) -> TokenArrays:
        """Do not change logit_bias or allowed_token_ids `with_valid`."""
        biases = np.array(list(self.logit_bias.values()), np.float32)
        allowed = self.allowed_token_ids
        allowed_ids = None if allowed is None else as_int32(allowed)
        return TokenArrays(as_int32(self.logit_bias), biases, allowed_ids)

    @property
    def mode(self) -> SamplingMode:
        if self.temperature == 0:
            return SamplingMode.GREEDY
        truncated = self.top_k > 0 or self.top_p < 1
        return SamplingMode.TRUNCATED if truncated else SamplingMode.CATEGORICAL

    @property
    def has_processors(self) -> bool:
        """Whether logits are processed before tokens are sampled; see `sampler.py`."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.min_tokens
            or self.allowed_token_ids is not None
        )


def as_int32(token_ids: Iterable[int]) -> np.ndarray:
    limit = np.iinfo(np.int32).max
    return np.array([min(token, limit) for token in token_ids], np.int32)
