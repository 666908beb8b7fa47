"""The requests that a caller sends to the engine, and the completions that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.sampling.params import SamplingParams


@dataclass(frozen=True)
class ReasoningSpan:
    """The reasoning that precedes the answer in a completion: from `start`, if the completion
    begins with it, to `end`. With an empty `start`, a completion begins inside its reasoning.
    """

    start: str
    end: str


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, as text or token ids, and how to continue it."""

    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    # The name of an adapter; None: the first that is loaded, if any; "": the base model.
    adapter: str | None = None
    # Requests share blocks of the prefix cache only if they have the same salt.
    cache_salt: str = ""
    # Special tokens that are part of the text even with `skip_special_tokens`.
    visible_token_ids: frozenset[int] = frozenset()
    # Stop strings have no effect before the end of the reasoning.
    reasoning: ReasoningSpan | None = None


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to a completion, by `time.monotonic`."""

    started_at: float  # it got its slot
    first_token_at: float
    finished_at: float


@dataclass(frozen=True)
class Completion:
    """The result of a request, or one of the `n` results of a request with `n` choices.

    `finish_reason` is "end" (an end-of-sequence or stop token), "stop" (a stop string), "length" or
    "error"; `error` then says what is wrong with the request. `stop_reason` is the text of `stop`
    or the id of `stop_token_ids` that ended it.
    """

    index: int  # of the request, in the order in which requests were read
    token_ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish_reason: str
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if the request wants them
    choice: int = 0  # which of the n completions
    stop_reason: str | int | None = None
    # Of the tokens of the prompt, in the first choice of a request that wants them. The first token
    # has none.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    times: RequestTimes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CompletionDelta:
    """The text and tokens that a step adds to a completion. The last delta has the completion.

    Tokens come with their text. Tokens whose text is not final yet, since it may begin a stop
    string or end inside a character, come with a later delta.
    """

    index: int
    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first delta
    completion: Completion | None = None
