"""Text around the engine, which works on token ids: requests going in, completions coming out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.detokenizer import Detokenizer
from maxtext.inference.requests import Completion, GenerationRequest
from maxtext.inference.sequence import StepOutput
from maxtext.tokenizers import Tokenizer

NO_TOKENIZER = "this model came without a tokenizer"


def is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer)


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
    stop ids. Raises UserError if the request is malformed.
    """
    request = tokenize(request, tokenizer)
    prompt, params = request.prompt, request.params
    if isinstance(prompt, str):
        raise UserError(f"{NO_TOKENIZER}: give token ids instead of text")
    if not isinstance(prompt, Sequence | np.ndarray) or not all(map(is_token_id, prompt)):
        raise UserError(f"a prompt is text or token ids, whole numbers, not {str(prompt)[:80]}")
    if not is_token_id(params.max_new_tokens):
        raise UserError(
            f"max_new_tokens={params.max_new_tokens} must be a whole number of at least 1"
        )
    check_positions(config, len(prompt) + params.max_new_tokens)
    if params.stop and tokenizer is None:
        raise UserError(f"{NO_TOKENIZER}, so it cannot match `stop` texts: leave `stop` out")
    if not params.ignore_eos:
        stop_token_ids = (*params.stop_token_ids, *eos_ids)
        params = replace(params, stop_token_ids=stop_token_ids)
    return GenerationRequest(tuple(int(token) for token in prompt), params)


def check_positions(config: MaxTextConfig, length: int) -> None:
    """Raise UserError if a sequence is longer than the learned position embeddings."""
    positions = config.trainable_position_size
    if 0 < positions < length:
        raise UserError(f"{length} tokens exceed the {positions} positions that this model learned")


class OutputProcessor:
    """Turns the step outputs of one request into text deltas and a Completion."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer | None):
        self.index = index
        self.params = request.params
        self.detokenizer = None
        if tokenizer is not None:
            prompt_ids = [int(token) for token in request.prompt]
            self.detokenizer = Detokenizer(tokenizer, prompt_ids, request.params.stop)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []

    def add(self, output: StepOutput) -> tuple[str, str | None]:
        """The text delta of a step, and the finish reason if the request is finished."""
        tokens = output.sampled_tokens
        # One token at a time where a stop text may match: the completion ends with the token that
        # completes it.
        size = 1 if self.params.stop else max(len(tokens), 1)
        starts = range(0, len(tokens), size) if tokens or not output.finish_reason else [0]
        text_delta = ""
        for start in starts:
            new = tokens[start : start + size]
            last = output.finish_reason is not None and start + len(new) >= len(tokens)
            self.token_ids += new
            self.log_probs += output.log_probs[start : start + size]
            if self.detokenizer is None:
                continue
            shown = [token for token in new if token not in self.params.stop_token_ids]
            text_delta += self.detokenizer.add(shown, last)
            if self.detokenizer.stopped:
                return text_delta, "stop"
        return text_delta, output.finish_reason

    def completion(self, finish_reason: str, error: str | None) -> Completion:
        return Completion(
            index=self.index,
            token_ids=tuple(self.token_ids),
            text=None if self.detokenizer is None else self.detokenizer.text,
            finish_reason=finish_reason,
            error=error,
            log_probs=tuple(self.log_probs),
        )
