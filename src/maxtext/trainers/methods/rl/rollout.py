"""Rollouts: completions that the inference engine samples from weights of a training run.

The engine runs the model of training on the arrays of the training state, in the same process and
on the same mesh, so that nothing is copied; or on copies on other devices. `sync` gives it the
weights of the current step with empty caches; `release` frees its caches, before an update needs
the memory and deletes the weights. Programs are compiled once. Reinforcement learning and on-policy
distillation sample with it.

A token depends on its own sequence, its seed and the weights. `sample_seed` derives the seed of a
completion from the step, its prompt and its number, so that the composition of a batch and the
number of slots do not change a text.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import Checkpoint, open_checkpoint
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.cache_config import make_cache_config
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.programs import Programs
from maxtext.inference.llm import MAX_SLOTS
from maxtext.inference.loading import find_eos_ids
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.sampler import derive_seed
from maxtext.inference.text.session import EngineSession, PreparedRequest
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

    The fields from `step` on are empty until reward functions have scored the rollout.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    trained_on: tuple[bool, ...] | None = None  # which of `token_ids` are sampled; None: all
    step: int = 0
    prompt: object = ""  # of the row of data: a text, or messages
    completion: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)  # by function; nan: not scored
    reward: float = 0.0  # their weighted sum; nan: not scored
    advantage: float = 0.0
    old_logps: tuple[float, ...] = ()  # as `log_probs`, of the trainer with the same weights

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that `log_probs` belong to."""
        if self.trained_on is None:
            return self.token_ids
        pairs = zip(self.token_ids, self.trained_on, strict=True)
        return tuple(token for token, is_trained_on in pairs if is_trained_on)

    def text(self, tokenizer: Tokenizer) -> str:
        """The text that the model wrote."""
        return tokenizer.decode(self.token_ids)

    def row(self, length: int) -> Batch:
        """The fields of a row of a batch, [length], in which sampled tokens are trained on."""
        ids = np.array(self.prompt_ids + self.token_ids, np.int32)
        mask = np.arange(len(ids)) >= len(self.prompt_ids)
        if self.trained_on is not None:
            mask[len(self.prompt_ids) :] = self.trained_on
        return pad_row(masked_sequence(ids, mask), length)


class Sampler:
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
        self.engine: InferenceEngine | None = None
        self.session: EngineSession | None = None  # of the lease
        self.requests: dict[int, GenerationRequest] = {}  # of the session, by index

    def sync(self, weights: Tree, num_requests: int, must_copy: bool = False) -> None:
        """Sample from these weights from here on, `num_requests` at a time if they fit in memory.
        `must_copy`: the weights are used while an update deletes the trainer's. Raises UserError if
        the engine does not have these weights afterwards."""
        self.release()
        if must_copy and self.weight_sync is None:
            weights = jax.tree.map(jnp.copy, weights)
        config, trainer_weights = self.config, weights
        if self.weight_sync is not None:
            weights = self.weight_sync.copy(weights)
        elif config.parameter_memory_host_offload:
            shardings = self.rules.shardings(self.template.axes, self.template.weights)
            weights = jax.device_put(weights, jax.tree.map(on_device, shardings))
        length = cache_length(config)
        # Time must not decide which programs run: a resumed run samples the same bits.
        self.engine = InferenceEngine(
            self.paged_programs or self.programs,
            weights,
            min(num_requests, config.max_num_seqs or MAX_SLOTS),
            length,
            fits_slots=True,
            memory_fraction=config.hbm_utilization_vllm,
            timed=False,
            max_batched_tokens=config.max_num_batched_tokens,
            shared_prompts=bool(config.use_grpo) and config.num_generations > 1,
        )
        check_synced(trainer_weights, self.engine.weights)

    @cached_property
    def paged_programs(self) -> Programs | None:
        """Programs with a paged KV cache, which decode steps read in place on one GPU; None on
        other devices, or if the keys already say how caches are."""
        config = self.config
        has_keys = config.attention == "paged" or config.enable_prefix_caching
        if has_keys or not self.programs.has_caches or self.programs.build.only_platform != "gpu":
            return None
        keys = {
            "attention": "paged",
            "pagedattn_tokens_per_page": PAGE_TOKENS,
            "pagedattn_num_pages": 0,  # as many as the sequences need
        }
        return replace(
            self.programs,
            config=config.model_copy(update=keys),
            decode_template=merged_template(config, self.template, self.rules),
        )

    def release(self) -> None:
        """Free the caches, and drop the weights."""
        self.engine = None

    @contextlib.contextmanager
    def synced(self, weights: Tree, num_requests: int) -> Iterator[None]:
        """`sync`, and `release` at the end."""
        self.sync(weights, num_requests)
        try:
            yield
        finally:
            self.release()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Rollout]:
        """The rollout of each request of token ids, in order. Raises UserError if one cannot be
        served, or if logits are not finite."""
        rollouts: dict[int, Rollout] = {}
        with self.lease():
            for index, request in enumerate(requests):
                self.add(index, request)
            while len(rollouts) < len(requests):
                rollouts |= self.step()
        return [rollouts[index] for index in range(len(requests))]

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Exclusive use of the engine, for requests that come and go: `add` them at any time, and
        call `step` while there are unfinished ones."""
        assert self.engine is not None, "sync comes first"
        with self.engine.lease():
            self.session, self.requests = EngineSession(self.engine, self.tokenizer), {}
            try:
                yield
            finally:
                self.session = None

    def add(self, index: int, request: GenerationRequest) -> None:
        """Queue a request of token ids. Raises UserError if it cannot be served."""
        assert self.session is not None, "a lease comes first"
        if (reason := self.session.engine.reject_reason(request)) is not None:
            raise reason
        self.requests[index] = request
        # A request is for one completion of its group: `n` of its params is the size of the group.
        self.session.add(index, PreparedRequest(request, request), seeds=[request.params.seed])

    def step(self) -> dict[int, Rollout]:
        """Run a step of the engine, and return the rollouts that it finishes, by the index of
        their request. Raises UserError if logits are not finite."""
        assert self.session is not None, "a lease comes first"
        rollouts = {}
        for delta in self.session.step():
            completion = delta.completion
            if completion is None:
                continue
            if completion.error is not None:
                raise UserError(completion.error)
            rollouts[delta.index] = Rollout(
                tuple(map(int, self.requests.pop(delta.index).prompt)),
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
