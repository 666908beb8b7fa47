"""Rollouts: completions that the engine of inference samples from weights of a training run.

The engine runs the model of training on the arrays of the training state, in the same process and
on the same mesh, so that nothing is copied. `sync` gives it the weights of the current step with
empty caches; `release` frees its caches, before an update needs the memory and deletes the weights.
Programs are compiled once.

A token depends on its own sequence, its seed and the weights. `sample_seed` derives the seed of a
completion from the step, its prompt and its number, so that the composition of a batch and the
number of slots do not change a text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.cache_config import fit_slots
from maxtext.inference.engine import InferenceEngine
from maxtext.inference.llm import MAX_SLOTS
from maxtext.inference.loading import find_eos_ids
from maxtext.inference.processing import OutputProcessor
from maxtext.inference.programs import Programs
from maxtext.inference.requests import Completion, GenerationRequest
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

    `log_probs` are those of the completion's tokens at the sampling temperature, over the whole
    vocabulary, if the request asked for them. `finish_reason` is "end", "stop" (a stop text) or
    "length".
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
    """Samples from the model of `template` sequences of up to max_target_length tokens, within the
    limits max_num_seqs, max_num_batched_tokens, kv_cache_buffer and hbm_utilization_vllm."""

    def __init__(self, config: MaxTextConfig, template: Template, rules: AxisRules):
        if jax.process_count() > 1:
            raise ConfigError(
                "completions are sampled in one process, and this run has "
                f"{jax.process_count()}: start it in one"
            )
        self.config = config
        self.rules = rules
        self.template = template
        self.programs = Programs(
            config,
            template,
            rules,
            build_context(config, rules),
            logprobs_temperature=config.decode_sampling_temperature if config.use_grpo else 1.0,
        )
        self.tokenizer = load_tokenizer(config) if config.stop_strings else None
        self.engine: InferenceEngine | None = None

    def sync(self, weights: Any, num_requests: int) -> None:
        """Sample from these weights from here on, `num_requests` at a time if they fit in memory.
        Raises UserError if the engine does not have these weights afterwards."""
        self.release()
        config, trainer_weights = self.config, weights
        if config.parameter_memory_host_offload:
            shardings = self.rules.shardings(self.template.axes, self.template.weights)
            weights = jax.device_put(weights, jax.tree.map(on_device, shardings))
        buffer = config.kv_cache_buffer if config.use_grpo else 0
        length = config.max_target_length + buffer
        limit = min(num_requests, config.max_num_seqs or MAX_SLOTS)
        # Time must not decide which programs run: a resumed run samples the same bits.
        self.engine = InferenceEngine(
            self.programs,
            weights,
            fit_slots(self.programs, limit, length, config.hbm_utilization_vllm),
            length,
            timed=False,
            max_batched_tokens=config.max_num_batched_tokens,
        )
        check_synced(trainer_weights, self.engine.weights)

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
        processors = [
            OutputProcessor(index, 0, request, request, self.tokenizer)
            for index, request in enumerate(requests)
        ]
        completions: dict[int, Completion] = {}
        with self.engine.lease():
            for index, request in enumerate(requests):
                self.engine.add_request(index, request)
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if output.error is not None:
                        raise UserError(output.error)
                    index = output.request_id
                    if index in completions:  # tokens that were in flight after a stop text
                        continue
                    completion = processors[index].add(output).completion
                    if completion is not None:
                        completions[index] = completion
                        if output.finish_reason is None:
                            self.engine.abort(index)
        return [
            Rollout(
                tuple(int(token) for token in request.prompt),
                completions[index].token_ids,
                log_probs=tuple(each.logprob for each in completions[index].logprobs),
                finish_reason=completions[index].finish_reason,
            )
            for index, request in enumerate(requests)
        ]


def check_synced(trainer_weights: Any, sampler_weights: Any) -> None:
    """Raise UserError if the sampler has other tensors than the trainer, or other values in one:
    silent failures of weight synchronization teach from the samples of another policy."""
    expected, actual = (
        dict(jax.tree.leaves_with_path(tree)) for tree in (trainer_weights, sampler_weights)
    )
    if different := expected.keys() ^ actual.keys():
        raise UserError(
            f"weight sync failed: only one of trainer and sampler has {describe_paths(different)}"
        )
    copied = [path for path in expected if expected[path] is not actual[path]]
    stale = [path for path in copied if checksum(expected[path]) != checksum(actual[path])]
    if stale:
        raise UserError(
            "weight sync failed: the sampler has other values than the trainer in "
            f"{describe_paths(stale)}"
        )


def describe_paths(paths: Collection[Any]) -> str:
    first = sorted(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)[0]
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more tensors"


def checksum(array: jax.Array) -> int:
    """The sum of the bits of an array's elements, modulo 2^32."""
    return int(sum_bits(array))


@jax.jit
def sum_bits(array: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
        array = jax.lax.bitcast_convert_type(array, kinds[array.dtype.itemsize])
    return jnp.sum(array.astype(jnp.uint32))


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
