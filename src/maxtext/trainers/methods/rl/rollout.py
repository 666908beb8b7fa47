"""Rollouts: completions that the inference engine samples from weights of a training run.

The engine runs the model of training on the arrays of the training state, in the same process and
on the same mesh, so that nothing is copied; or on copies on other devices. `sync` gives it the
weights of the current step with empty caches; `release` frees its caches, before an update needs
the memory and deletes the weights. Programs are compiled once.

A token depends on its own sequence, its seed and the weights. `sample_seed` derives the seed of a
completion from the step, its prompt and its number, so that the composition of a batch and the
number of slots do not change a text.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.cache_config import fit_slots, make_cache_config
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.programs import Programs
from maxtext.inference.llm import MAX_SLOTS
from maxtext.inference.loading import find_eos_ids
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.sampler import derive_seed
from maxtext.inference.text.session import OutputProcessor
from maxtext.input_pipeline import Batch
from maxtext.input_pipeline.packing import masked_sequence, pad_row
from maxtext.layers.context import INFERENCE
from maxtext.layers.lora import split_adapter
from maxtext.layers.parameters import Template
from maxtext.layers.weight_layout import packing_unsupported_reason
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules
from maxtext.sharding.state import on_device
from maxtext.tokenizers import Tokenizer, load_tokenizer
from maxtext.trainers.adapters import model_context, run_adapters
from maxtext.trainers.methods.rl.weight_sync import WeightSync, check_synced

PAGE_TOKENS = 32  # of a paged KV cache


@dataclass(frozen=True)
class Rollout:
    """A prompt and a sampled completion, which includes the token that ended it.

    `log_probs` are those of the completion's tokens at the sampling temperature, over the whole
    vocabulary, if the request asked for them. `finish_reason` is "end", "stop" (a stop string),
    "length", or "turns" (a conversation with as many turns as are allowed).
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    learned: tuple[bool, ...] | None = None  # which of `token_ids` are sampled; None: all

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that `log_probs` belong to."""
        if self.learned is None:
            return self.token_ids
        pairs = zip(self.token_ids, self.learned, strict=True)
        return tuple(token for token, is_learned in pairs if is_learned)

    def text(self, tokenizer: Tokenizer) -> str:
        """The text that the model wrote."""
        return tokenizer.decode(self.token_ids)

    def row(self, length: int) -> Batch:
        """The fields of a row of a batch, [length], in which sampled tokens are learned."""
        ids = np.array(self.prompt_ids + self.token_ids, np.int32)
        mask = np.arange(len(ids)) >= len(self.prompt_ids)
        if self.learned is not None:
            mask[len(self.prompt_ids) :] = self.learned
        return pad_row(masked_sequence(ids, mask), length)


class RolloutEngine:
    """Samples from the model of `template` sequences of up to max_target_length tokens, within the
    limits max_num_seqs, max_num_batched_tokens, kv_cache_buffer and hbm_utilization_vllm."""

    def __init__(
        self,
        config: MaxTextConfig,
        template: Template,
        rules: AxisRules,
        weight_sync: WeightSync | None = None,
    ):
        """`weight_sync` copies the weights to the mesh of `rules`; None: they are there."""
        if jax.process_count() > 1:
            raise ConfigError(
                "completions are sampled in one process, and this run has "
                f"{jax.process_count()}: start it in one"
            )
        self.config = config
        self.rules = rules
        self.weight_sync = weight_sync
        self.template = template
        self.programs = Programs(
            config,
            template,
            rules,
            build_context(config, rules),
            logprobs_temperature=config.decode_sampling_temperature if config.use_grpo else 1.0,
        )
        self.tokenizer = load_tokenizer(config) if config.stop_strings else None
        self.paged: dict[int, Programs] = {}  # by the number of blocks
        self.engine: InferenceEngine | None = None

    def sync(self, weights: Any, num_requests: int) -> None:
        """Sample from these weights from here on, `num_requests` at a time if they fit in memory.
        Raises UserError if the engine does not have these weights afterwards."""
        self.release()
        config, trainer_weights = self.config, weights
        if self.weight_sync is not None:
            weights = self.weight_sync.copy(weights)
        elif config.parameter_memory_host_offload:
            shardings = self.rules.shardings(self.template.axes, self.template.weights)
            weights = jax.device_put(weights, jax.tree.map(on_device, shardings))
        length = cache_length(config)
        limit = min(num_requests, config.max_num_seqs or MAX_SLOTS)
        slots = fit_slots(self.programs, limit, length, config.hbm_utilization_vllm)
        # Time must not decide which programs run: a resumed run samples the same bits.
        self.engine = InferenceEngine(
            self.paged_programs(slots, length) or self.programs,
            weights,
            slots,
            length,
            timed=False,
            max_batched_tokens=config.max_num_batched_tokens,
            shared_prompts=bool(config.use_grpo) and config.num_generations > 1,
        )
        check_synced(trainer_weights, self.engine.weights)

    def paged_programs(self, slots: int, length: int) -> Programs | None:
        """Programs with a paged KV cache for this number of sequences, which decode steps read in
        place on one GPU; None on other devices, or if the keys already say how caches are."""
        config = self.config
        has_keys = config.attention == "paged" or config.enable_prefix_caching
        if has_keys or not self.programs.has_caches or self.programs.build.only_platform != "gpu":
            return None
        num_blocks = slots * -(-length // PAGE_TOKENS)
        if num_blocks not in self.paged:
            keys = {
                "attention": "paged",
                "pagedattn_tokens_per_page": PAGE_TOKENS,
                "pagedattn_num_pages": num_blocks,
            }
            self.paged[num_blocks] = replace(
                self.programs,
                config=config.model_copy(update=keys),
                decode_template=merged_template(config, self.template, self.rules),
            )
        return self.paged[num_blocks]

    def release(self) -> None:
        """Free the caches, and drop the weights."""
        self.engine = None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Rollout]:
        """The rollout of each request of token ids, in order. Raises UserError if one cannot be
        served, or if logits are not finite."""
        rollouts: dict[int, Rollout] = {}
        with self.session() as session:
            for index, request in enumerate(requests):
                session.add(index, request)
            while len(rollouts) < len(requests):
                rollouts |= session.step()
        return [rollouts[index] for index in range(len(requests))]

    @contextlib.contextmanager
    def session(self) -> Iterator["RolloutSession"]:
        """Exclusive use of the engine, for requests that come and go."""
        assert self.engine is not None, "sync comes first"
        with self.engine.lease():
            yield RolloutSession(self.engine, self.tokenizer)


class RolloutSession:
    """`add` requests at any time, and call `step` while there are unfinished ones. `tokenizer`: for
    stop strings."""

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer | None):
        self.engine = engine
        self.tokenizer = tokenizer
        self.sequence_ids = itertools.count()
        # The index of a request, the request and its output, by the id of its sequence
        self.running: dict[int, tuple[int, GenerationRequest, OutputProcessor]] = {}

    def add(self, index: int, request: GenerationRequest) -> None:
        """Queue a request of token ids. Raises UserError if it cannot be served."""
        if (reason := self.engine.reject_reason(request)) is not None:
            raise reason
        sequence_id = next(self.sequence_ids)
        processor = OutputProcessor(index, 0, request, request, self.tokenizer)
        self.running[sequence_id] = index, request, processor
        self.engine.add_request(sequence_id, request)

    def step(self) -> dict[int, Rollout]:
        """Run a step of the engine, and return the rollouts that it finishes, by the index of
        their request. Raises UserError if logits are not finite."""
        rollouts = {}
        for output in self.engine.step():
            if output.error is not None:
                raise UserError(output.error)
            if output.request_id not in self.running:
                continue  # tokens that were in flight after a stop string
            index, request, processor = self.running[output.request_id]
            completion = processor.add(output).completion
            if completion is None:
                continue
            del self.running[output.request_id]
            if output.finish_reason is None:
                self.engine.abort(output.request_id)
            rollouts[index] = Rollout(
                tuple(map(int, request.prompt)),
                completion.token_ids,
                log_probs=tuple(each.logprob for each in completion.logprobs),
                finish_reason=completion.finish_reason,
            )
        return rollouts


def merged_template(config: MaxTextConfig, template: Template, rules: AxisRules) -> Template | None:
    """The model of `template` with queries, keys and values of one matmul, for decode programs;
    None if they cannot be merged."""
    _, adapter = split_adapter(template.weights)
    adapters = run_adapters(config) if adapter else None
    context = model_context(config, rules, INFERENCE, adapters)
    if packing_unsupported_reason(context):
        return None
    return make_template(config, replace(context, copies_weights=True))


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """The lengths of completions, and the share that the limit of their length ended."""
    if not rollouts:
        return {}
    lengths = [len(rollout.sampled_ids) for rollout in rollouts]
    clipped = [rollout.finish_reason == "length" for rollout in rollouts]
    return {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped": float(np.mean(clipped)),
    }


def cache_length(config: MaxTextConfig) -> int:
    """Tokens of the cache of a sequence."""
    return config.max_target_length + (config.kv_cache_buffer if config.use_grpo else 0)


def engine_bytes(config: MaxTextConfig, template: Template, rules: AxisRules) -> int:
    """Bytes of the caches of all rollouts that are sampled at a time, and of the weights that
    decode programs have copies of, on all devices together."""
    prompts = config.rollout_micro_batch_size
    requests = config.num_generations * (prompts if prompts > 0 else config.batch_size)
    programs = Programs(
        config,
        template,
        rules,
        build_context(config, rules),
        decode_template=merged_template(config, template, rules),
    )
    slots = min(requests, config.max_num_seqs or MAX_SLOTS)
    caches = jax.eval_shape(
        lambda: programs.runner.init_caches(
            make_cache_config(programs, slots, cache_length(config))
        )
    )
    copies = jax.eval_shape(programs.changed_decode_weights, template.weights)
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves((caches, copies)))


def sample_seed(seed: int, step: int, prompt: int, sample: int = 0) -> int:
    """The seed of a completion: `seed` of the run, the index of the prompt in the batch of `step`,
    and the number of the sample of this prompt."""
    return derive_seed(seed % 2**32, step, prompt, sample)


def stop_token_ids(config: MaxTextConfig, checkpoint: Checkpoint | None) -> tuple[int, ...]:
    """The tokens that end a completion: those of the model's folder, or of the tokenizer."""
    if checkpoint is None and config.load_parameters_path:
        checkpoint = open_checkpoint(config.load_parameters_path)
    assets = () if checkpoint is None else checkpoint.hf_assets
    return tuple(find_eos_ids(assets, load_tokenizer(config)))
