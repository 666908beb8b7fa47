"""The requests of one lease of an engine: text and choices around token ids.

`EngineSession` starts the sequences of a request, one for each of its `n` choices, turns their
step outputs into text deltas, and ends them at stop strings. `LLM`, `AsyncEngine` and the rollouts
of training run on it.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxtext.adapters.serving import LoadedAdapter
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.sequence import StepOutput
from maxtext.inference.requests import (
    Completion,
    CompletionDelta,
    GenerationRequest,
    RequestTimes,
)
from maxtext.inference.sampling.bad_words import TokenMatcher
from maxtext.inference.sampling.logprobs import TokenLogprobs
from maxtext.inference.sampling.sampler import derive_seed, fold_seed
from maxtext.inference.text.detokenizer import Detokenizer
from maxtext.inference.validation import RequestError, shorten
from maxtext.tokenizers import Tokenizer

NO_TOKENIZER = "this model came without a tokenizer"


def is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def are_token_ids(values: Iterable[Any]) -> bool:
    """Whether all are token ids. Few types are looked at, however long a prompt is."""
    return all(issubclass(kind, int | np.integer) for kind in set(map(type, values)))


def tokenize(request: GenerationRequest, tokenizer: Tokenizer | None) -> GenerationRequest:
    """The request with its prompt as token ids, if there is a tokenizer."""
    if not isinstance(request.prompt, str) or tokenizer is None:
        return request
    return replace(request, prompt=tokenizer.encode_prompt(request.prompt))


def sequence_length(request: GenerationRequest) -> int:
    """Tokens of the prompt and the completion of a tokenized request; 0 if it is invalid."""
    prompt, count = request.prompt, request.params.max_new_tokens
    valid = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str)
    return len(prompt) + count if valid and isinstance(count, int) else 0


def prepare_request(
    request: GenerationRequest,
    config: MaxTextConfig,
    tokenizer: Tokenizer | None,
    eos_ids: Sequence[int],
) -> GenerationRequest:
    """The request as the engine takes it: token ids, and the model's end-of-sequence ids among the
    stop ids. Raises RequestError if the request is malformed.
    """
    request = tokenize(request, tokenizer)
    prompt, params = request.prompt, request.params
    if isinstance(prompt, str):
        raise RequestError(f"{NO_TOKENIZER}: give token ids instead of text", "prompt")
    if not isinstance(prompt, Sequence | np.ndarray) or not are_token_ids(prompt):
        raise RequestError(
            f"a prompt is text or token ids, whole numbers, not {str(prompt)[:80]}", "prompt"
        )
    if not is_token_id(params.max_new_tokens):
        raise RequestError(
            f"max_new_tokens={params.max_new_tokens} must be a whole number of at least 1",
            "max_new_tokens",
        )
    check_positions(config, len(prompt) + params.max_new_tokens)
    if params.stop and tokenizer is None:
        raise RequestError(
            f"{NO_TOKENIZER}, so it cannot match `stop` texts: leave `stop` out", "stop"
        )
    arrays = params.token_arrays
    allowed_array = () if arrays.allowed is None else arrays.allowed
    for name, token_ids, array in (
        ("logit_bias", params.logit_bias, arrays.biased),
        ("allowed_token_ids", params.allowed_token_ids or (), allowed_array),
        ("stop_token_ids", params.stop_token_ids, params.stop_token_ids),
    ):
        if len(array) and np.max(array) >= config.vocab_size:
            outside = next(token for token in token_ids if token >= config.vocab_size)
            raise RequestError(
                f"{name} has token {shorten(outside)}, which is outside the vocabulary, 0 to "
                f"{config.vocab_size - 1}",
                name,
            )
    if params.min_tokens > params.max_new_tokens:
        raise RequestError(
            f"min_tokens={params.min_tokens} exceeds max_new_tokens={params.max_new_tokens}",
            "min_tokens",
        )
    if not params.ignore_eos:
        stop_token_ids = (*params.stop_token_ids, *eos_ids)
        params = params.with_valid(stop_token_ids=stop_token_ids)
    allowed_ids = params.allowed_token_ids
    if params.min_tokens and allowed_ids and set(allowed_ids) <= set(params.stop_token_ids):
        raise RequestError(
            "allowed_token_ids has only tokens that end the completion, but min_tokens is "
            f"{params.min_tokens}",
            "allowed_token_ids",
        )
    if not isinstance(request.cache_salt, str):
        raise RequestError(
            f"cache_salt must be text, not {shorten(request.cache_salt)}", "cache_salt"
        )
    return replace(request, prompt=tuple(map(int, prompt)), params=params)


def check_positions(config: MaxTextConfig, length: int) -> None:
    """Raise RequestError if a sequence is longer than the learned position embeddings."""
    positions = config.trainable_position_size
    if 0 < positions < length:
        raise RequestError(
            f"{length} tokens exceed the {positions} positions that this model learned",
            code="context_length_exceeded",
        )


def visible_token_ids(request: GenerationRequest, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that are part of the text of a request."""
    if request.params.skip_special_tokens:
        return request.visible_token_ids
    return tokenizer.special_ids


class OutputProcessor:
    """Turns the step outputs of one choice of a request into deltas and a Completion.

    `request` is what `prepare_request` returned for `original`.
    """

    def __init__(
        self,
        index: int,
        choice: int,
        original: GenerationRequest,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
    ):
        self.index = index
        self.choice = choice
        self.params = request.params
        self.stop_token_ids = original.params.stop_token_ids  # without end-of-sequence ids
        self.detokenizer = None
        if tokenizer is not None:
            self.detokenizer = Detokenizer(
                tokenizer,
                prompt=list(map(int, request.prompt)),
                stop=self.params.stop,
                include_stop=self.params.include_stop_str_in_output,
                visible_ids=visible_token_ids(request, tokenizer),
                reasoning=request.reasoning,
            )
        self.token_ids: list[int] = []
        self.num_final = 0  # of them, whose text is emitted
        self.started_at = self.first_token_at = 0.0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.num_cached_tokens = 0

    def add(self, output: StepOutput) -> CompletionDelta:
        """The delta of a step, with the completion if it is finished now."""
        if output.sampled_tokens and not self.token_ids:
            self.first_token_at = time.monotonic()
        self.started_at = output.started_at
        start = self.num_final
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        text, finish_reason = self.add_tokens(output)
        completion = None
        if finish_reason is not None:
            completion = self.completion(finish_reason, output.error)
            self.num_final = len(self.token_ids)
        return CompletionDelta(
            index=self.index,
            choice=self.choice,
            text=text,
            token_ids=tuple(self.token_ids[start : self.num_final]),
            logprobs=tuple(self.logprobs[start : self.num_final]),
            prompt_logprobs=output.prompt_logprobs,
            completion=completion,
        )

    def add_tokens(self, output: StepOutput) -> tuple[str, str | None]:
        """The text delta of a step, and the finish reason if the completion is finished."""
        tokens = output.sampled_tokens
        # One token at a time where a stop string may match, since the completion ends with the
        # token that completes it, and where log-probabilities go with the text of their token.
        has_text = self.detokenizer is not None
        by_token = has_text and (self.params.stop or self.params.logprobs is not None)
        size = 1 if by_token else max(len(tokens), 1)
        starts = range(0, len(tokens), size) if tokens or not output.finish_reason else [0]
        text_delta = ""
        for start in starts:
            new = tokens[start : start + size]
            last = output.finish_reason is not None and start + len(new) >= len(tokens)
            self.token_ids += new
            self.logprobs += output.logprobs[start : start + size]
            if self.detokenizer is None:
                self.num_final = len(self.token_ids)
                continue
            shown = [token for token in new if not self.is_hidden(token)]
            too_early = len(self.token_ids) <= self.params.min_tokens
            text_delta += self.detokenizer.add(shown, last, ignore_stop=too_early)
            if self.detokenizer.stopped:
                return text_delta, "stop"
            if not self.detokenizer.holds_back:
                self.num_final = len(self.token_ids)
        return text_delta, output.finish_reason

    def is_hidden(self, token: int) -> bool:
        """Whether a token ends the completion and is not part of its text."""
        params = self.params
        return token in params.stop_token_ids and not params.include_stop_str_in_output

    @property
    def stop_reason(self) -> str | int | None:
        if self.detokenizer is not None and self.detokenizer.stopped:
            return self.detokenizer.stop_text
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.stop_token_ids else None

    def completion(self, finish_reason: str, error: str | None) -> Completion:
        return Completion(
            index=self.index,
            token_ids=tuple(self.token_ids),
            text=None if self.detokenizer is None else self.detokenizer.text,
            finish_reason=finish_reason,
            error=error,
            logprobs=tuple(self.logprobs),
            choice=self.choice,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            times=RequestTimes(self.started_at, self.first_token_at, time.monotonic()),
            stop_reason=self.stop_reason if finish_reason in ("stop", "end") else None,
        )


@dataclass(frozen=True)
class PreparedRequest:
    """A request that the engine can serve: a prompt of token ids, and stop ids with the model's
    end-of-sequence ids among them. `original` is the request as it came.
    """

    request: GenerationRequest
    original: GenerationRequest
    adapter: LoadedAdapter | None = None
    grammar: TokenMatcher | None = None  # at the beginning of its text


class EngineSession:
    """`add` requests at any time, and call `step` while there are unfinished ones."""

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer | None):
        self.engine = engine
        self.tokenizer = tokenizer
        self.sequence_ids = itertools.count()
        self.processors: dict[int, OutputProcessor] = {}  # by the id of the sequence
        self.num_generated = 0  # tokens
        self.sequences: dict[int, set[int]] = {}  # unfinished, by the id of the request

    @property
    def has_unfinished(self) -> bool:
        return bool(self.processors)

    def add(
        self, request_id: int, prepared: PreparedRequest, seeds: Sequence[int] | None = None
    ) -> None:
        """Start the choices of a request: one for each of `seeds`, by default `n`, whose seeds
        derive from that of the request."""
        request = prepared.request
        if seeds is None:
            seeds = [choice_seed(request.params.seed, choice) for choice in range(request.params.n)]
        self.sequences[request_id] = set()
        for choice, seed in enumerate(seeds):
            sequence_id = next(self.sequence_ids)
            self.processors[sequence_id] = OutputProcessor(
                request_id, choice, prepared.original, request, self.tokenizer
            )
            self.sequences[request_id].add(sequence_id)
            params = request.params.with_valid(seed=seed)
            if choice > 0:  # all have the same prompt
                params = params.with_valid(prompt_logprobs=None)
            self.engine.add_request(
                sequence_id,
                replace(request, params=params),
                prepared.adapter,
                prepared.grammar and prepared.grammar.copy(),
            )

    def abort(self, request_id: int) -> None:
        """Drop a request: its slots and blocks are free at once. An unknown id is ignored."""
        for sequence_id in self.sequences.pop(request_id, ()):
            del self.processors[sequence_id]
            self.engine.abort(sequence_id)

    def step(self) -> list[CompletionDelta]:
        """Run a step of the engine, and return what it adds to each choice."""
        deltas = []
        for output in self.engine.step():
            processor = self.processors.get(output.request_id)
            if processor is None:
                continue  # a stop string has ended it
            num_before = len(processor.token_ids)
            delta = processor.add(output)
            self.num_generated += len(processor.token_ids) - num_before
            deltas.append(delta)
            if delta.completion is not None:
                if output.finish_reason is None:
                    self.engine.abort(output.request_id)
                self.finish(output.request_id, delta.completion)
        return deltas

    def finish(self, sequence_id: int, completion: Completion) -> None:
        del self.processors[sequence_id]
        unfinished = self.sequences[completion.index]
        unfinished.remove(sequence_id)
        if not unfinished:
            del self.sequences[completion.index]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice. The first has the seed itself, as if it were alone."""
    return seed if choice == 0 else derive_seed(fold_seed(seed), 0, choice)
