"""Rollouts: completions that the engine of inference samples from weights of a training run.

The engine runs the model of training on the arrays of the training state, in the same process and
on the same mesh, so that nothing is copied. `sync` gives it the weights of the current step with
empty caches; `release` frees its caches, before an update needs the memory and deletes the weights.
Programs are compiled once.

A token depends on its own sequence, its seed and the weights. `sample_seed` derives the seed of a
completion from the step, its prompt and its number, so that the composition of a batch and the
number of slots do not change a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.cache_config import fit_slots
from maxtext.inference.engine import InferenceEngine
from maxtext.inference.llm import MAX_SLOTS
from maxtext.inference.loading import find_eos_ids
from maxtext.inference.programs import Programs
from maxtext.inference.requests import GenerationRequest
from maxtext.input_pipeline import Batch
from maxtext.input_pipeline.packing import pad_row
from maxtext.input_pipeline.sequences import completion_sequence
from maxtext.layers.parameters import Template
from maxtext.models.transformer import build_context
from maxtext.sharding import AxisRules
from maxtext.sharding.state import on_device
from maxtext.tokenizers import load_tokenizer


@dataclass(frozen=True)
class Rollout:
    """A prompt and a sampled completion, which includes the token that ended it.

    `log_probs` are those of the completion's tokens under the logits at temperature 1, if the
    request asked for them. `finish_reason` is "end" or "length".
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str

    def row(self, length: int) -> Batch:
        """The fields of a row of a batch, [length], in which the completion is learned."""
        prompt, completion = (np.array(ids, np.int32) for ids in (self.prompt_ids, self.token_ids))
        return pad_row(completion_sequence(prompt, completion), length)


class RolloutEngine:
    """Samples from the model of `template`, with sequences of up to max_target_length tokens."""

    def __init__(self, config: MaxTextConfig, template: Template, rules: AxisRules):
        if jax.process_count() > 1:
            raise ConfigError(
                "completions are sampled in one process, and this run has "
                f"{jax.process_count()}: start it in one"
            )
        self.rules = rules
        self.template = template
        self.programs = Programs(config, template, rules, build_context(config, rules))
        self.engine: InferenceEngine | None = None

    def sync(self, weights: Any, num_requests: int) -> None:
        """Sample from these weights from here on, `num_requests` at a time if they fit in
        memory."""
        self.release()
        if self.programs.config.parameter_memory_host_offload:
            shardings = self.rules.shardings(self.template.axes, self.template.weights)
            weights = jax.device_put(weights, jax.tree.map(on_device, shardings))
        length = self.programs.config.max_target_length
        slots = fit_slots(self.programs, min(num_requests, MAX_SLOTS), length)
        # Time must not decide which programs run: a resumed run samples the same bits.
        self.engine = InferenceEngine(self.programs, weights, slots, length, timed=False)

    def release(self) -> None:
        """Free the caches, and drop the weights."""
        self.engine = None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Rollout]:
        """The rollout of each request of token ids, in order. Raises UserError if one cannot be
        served, or if logits are not finite."""
        assert self.engine is not None, "sync comes first"
        for reason in map(self.engine.reject_reason, requests):
            if reason is not None:
                raise reason
        token_ids: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        reasons = [""] * len(requests)
        with self.engine.lease():
            for index, request in enumerate(requests):
                self.engine.add_request(index, request)
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if output.error is not None:
                        raise UserError(output.error)
                    token_ids[output.request_id] += output.sampled_tokens
                    log_probs[output.request_id] += [each.logprob for each in output.logprobs]
                    reasons[output.request_id] = output.finish_reason or ""
        return [
            Rollout(
                tuple(int(token) for token in request.prompt),
                tuple(ids),
                log_probs=tuple(logps),
                finish_reason=reason,
            )
            for request, ids, logps, reason in zip(
                requests, token_ids, log_probs, reasons, strict=True
            )
        ]


def sample_seed(seed: int, step: int, prompt: int, sample: int = 0) -> int:
    """The seed of a completion: `seed` of the run, the index of the prompt in the batch of `step`,
    and the number of the sample of this prompt."""
    entropy = [seed % 2**32, step, prompt, sample]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def stop_token_ids(config: MaxTextConfig, checkpoint: Checkpoint | None) -> tuple[int, ...]:
    """The tokens that end a completion: those of the model's folder, or of the tokenizer."""
    if checkpoint is None and config.load_parameters_path:
        checkpoint = open_checkpoint(config.load_parameters_path)
    assets = () if checkpoint is None else checkpoint.hf_assets
    return tuple(find_eos_ids(assets, load_tokenizer(config)))
