"""The requests that a caller sends to the engine, and the completions that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.validation import RequestError


@dataclass(frozen=True)
class ReasoningSpan:
    """The delimiters of the reasoning that precedes the answer in a completion. The reasoning lasts
    from `start`, if the completion begins with it, to `end`. If `start` is empty, the completion
    begins inside the reasoning.
    """

    start: str
    end: str


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, as text or token ids, and how to continue it."""

    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    # The name of an adapter; None: the first adapter that is loaded, if any; "": the base model.
    adapter: str | None = None
    # Requests share blocks of the prefix cache only if they have the same salt.
    cache_salt: str = ""
    # Special tokens that are part of the text even with `skip_special_tokens`.
    visible_token_ids: frozenset[int] = frozenset()
    # If set, stop strings have no effect before the end of the reasoning.
    reasoning: ReasoningSpan | None = None


@dataclass(frozen=True)
class RequestTimes:
    """The times of a completion, by `time.monotonic`."""

    started_at: float  # when it got a slot
    first_token_at: float
    finished_at: float


@dataclass(frozen=True)
class Completion:
    """The result of a request, or one of the `n` results of a request with `n` choices.

    `finish_reason` is "end" (an end-of-sequence or stop token), "stop" (a stop string), "length" or
    "error". After an error, `error` is a sentence that says what is wrong with the request.
    `stop_reason` is the string of `stop`, or the id of `stop_token_ids`, that ended the completion.
    """

    index: int  # of the request, in the order in which requests were read
    token_ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish_reason: str
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if the request asks for them
    choice: int = 0  # the index among the n completions
    stop_reason: str | int | None = None
    # Of the prompt's tokens, in the first choice of a request that asks for them; None for the
    # first token.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    times: RequestTimes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CompletionDelta:
    """The text and tokens that a step adds to a completion. The last delta has the completion.

    A delta has the tokens of its text. If the text of a token is not final yet, since it may begin
    a stop string or end inside a character, the token comes with a later delta.
    """

    index: int
    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first delta
    completion: Completion | None = None


@dataclass(frozen=True)
class EngineStats:
    """The state of the engine after its last step. Counters are since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_in_use: int = 0
    num_blocks_cached: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0  # steps of a sequence with drafted tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
    running_adapters: tuple[str, ...] = ()  # that running sequences use
    waiting_adapters: tuple[str, ...] = ()


def reject_reason(
    request: GenerationRequest, vocab_size: int, max_length: int
) -> RequestError | None:
    """Why an engine for sequences of up to `max_length` tokens cannot serve a request of token ids;
    None if it can."""
    prompt, count = request.prompt, request.params.max_new_tokens
    if not len(prompt):
        return RequestError("the prompt is empty: there is nothing to continue", "prompt")
    if count < (1 if request.params.prompt_logprobs is None else 0):
        return RequestError(
            f"max_new_tokens={count} must be a whole number of at least 1, or 0 with "
            "prompt_logprobs",
            "max_new_tokens",
        )
    low, high = int(min(prompt)), int(max(prompt))
    if low < 0 or high >= vocab_size:
        invalid = low if low < 0 else high
        return RequestError(
            f"token id {invalid} is outside the vocabulary, 0 to {vocab_size - 1}", "prompt"
        )
    if len(prompt) + count > max_length:
        return RequestError(
            f"a prompt of {len(prompt)} tokens and {count} new tokens exceed "
            f"{max_length}, the maximum length of a sequence here: shorten the prompt, "
            "lower max_new_tokens, or raise max_target_length (with a paged cache also "
            "pagedattn_num_pages or pagedattn_max_pages_per_group)",
            code="context_length_exceeded",
        )
    return None
