"""The Python API: a model with its weights and, where it has one, its tokenizer."""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from maxtext.adapters.serving import AdapterSlots
from maxtext.adapters.spec import Adapter
from maxtext.checkpoint.open import (
    Checkpoint,
    model_param_infos,
    open_checkpoint,
    parse_dtype,
    save_hf_folder,
    save_native,
)
from maxtext.checkpoint.quantized import PackedWeights
from maxtext.checkpoint.tensors import CastTensors, Progress
from maxtext.checkpoint.weights import ModelWeights, param_dtypes
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.hub import find_folder
from maxtext.common.types import Tree
from maxtext.configs import fields
from maxtext.configs.sources import from_python
from maxtext.configs.startup import configure_process
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.adapter_methods import AdapterMethods
from maxtext.inference.drafts import load_drafts
from maxtext.inference.engine.drafting import Proposer
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.memory import Capacity
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.shapes import next_power_of_two
from maxtext.inference.engine.warmup import warm_up
from maxtext.inference.loading import (
    Folders,
    find_eos_ids,
    inference_context,
    load_weights,
    random_weights,
    read_adapters,
    refuse_dropped_tokens,
    resolve_config,
)
from maxtext.inference.requests import Completion, CompletionDelta, GenerationRequest
from maxtext.inference.sampling.bad_words import build_matcher
from maxtext.inference.sampling.grammar import GrammarCompiler
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.sampler import prompt_seed
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.inference.text.session import (
    NO_TOKENIZER,
    EngineSession,
    PreparedRequest,
    are_token_ids,
    check_positions,
    prepare_request,
    sequence_length,
    tokenize,
)
from maxtext.inference.validation import RequestError
from maxtext.layers.context import BuildContext
from maxtext.layers.parameters import Template
from maxtext.models.transformer import make_template, refuse_absent_kernels
from maxtext.sharding import AxisRules, make_mesh
from maxtext.tokenizers import Tokenizer, find_tokenizer, load_tokenizer

MAX_SLOTS = 256  # sequences at a time, for a list of prompts


class LLM(AdapterMethods):
    """A language model with its weights, sharded over the mesh of its configuration. Create it with
    `LLM.load` from a folder or a name, or with `LLM.from_config` from a resolved configuration.
    """

    def __init__(
        self,
        config: MaxTextConfig,
        template: Template,
        weights: Tree,
        checkpoint: Checkpoint | None = None,
        context: BuildContext | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        proposer: Proposer | None = None,
    ):
        """`template` and `weights` have the layout of checkpoints; the LLM owns the weights from
        now on. `context` overrides the context of the mesh. `adapters` maps names to adapters, and
        `proposer` drafts tokens. Raises UserError for a reward model."""
        if config.num_labels:
            raise UserError(
                f"{config.load_parameters_path or 'this'} is a reward model, which scores texts "
                "and generates none: maxtext grpo takes it as reward_model_path"
            )
        self.config = config
        self.template = template
        self.checkpoint = checkpoint
        self.rules = AxisRules.from_config(config, make_mesh(config))
        self.context = context or inference_context(config, self.rules)
        self.adapters = AdapterSlots(config.max_adapters, config.dtype.value)
        for name, adapter in (adapters or {}).items():
            self.adapters.add(name, adapter)
        self.proposer = proposer
        self.model = self.build_model(weights)
        self.param_infos = model_param_infos(template, config)
        self.disk_dtypes: dict[str, np.dtype] = {}  # of the weights in the checkpoint
        self.engine: InferenceEngine | None = None
        self.engines: weakref.WeakSet[InferenceEngine] = weakref.WeakSet()  # with these weights

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        progress: Progress | None = None,
        adapters: Folders = None,
        **keys: Any,
    ) -> "LLM":
        """Load a model from a Hugging Face folder, a native folder, a run's folder (its newest
        checkpoint), or `org/name` or `org/name@revision` of the Hugging Face Hub. A name from
        `maxtext models` gives a model with random weights.

        `adapters` are PEFT folders or names of the Hub: a list, in which each adapter is named
        after its folder, or a dict that maps names to folders. While weights are read, `progress`
        is called with (bytes done, total bytes, name of the last tensor).

        Keywords are configuration keys, such as dtype, weight_dtype, attention or
        ici_tensor_parallelism. Layers are unrolled unless scan_layers=True, and weights that are
        bfloat16 on disk stay bfloat16 unless weight_dtype is set. Raises ConfigError if the model
        is not found or a key is invalid, and UserError if the folder cannot be read as a model.
        """
        folder = find_folder(path, keys.get("hf_access_token"))
        if folder.is_dir():
            checkpoint = open_checkpoint(folder)
            config = resolve_config(from_python(keys), checkpoint)
            return cls.from_config(config, checkpoint, progress, adapters=adapters)
        if str(path) not in fields.choices("model_name"):
            raise ConfigError(
                f"{str(path)!r} is neither a folder nor the name of a model; "
                "`maxtext models` lists the names"
            )
        config = resolve_config(from_python(keys | {"model_name": str(path)}))
        return cls.from_config(config, adapters=adapters)

    @classmethod
    def from_config(
        cls,
        config: MaxTextConfig,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
        context: BuildContext | None = None,
        adapters: Folders = None,
    ) -> "LLM":
        """Build the model of a resolved configuration, with the weights of `checkpoint` or random
        weights. If the keys ask for it, save it or compile its programs.

        `context` is for tests of other devices. `progress` and `adapters` are as in `load`;
        adapters default to those at lora_input_adapters_path.
        """
        if config.parameter_memory_host_offload:
            raise ConfigError(
                "parameter_memory_host_offload=true is for training: "
                "leave it out when text is generated"
            )
        configure_process(config)
        template = make_template(config)
        rules = AxisRules.from_config(config, make_mesh(config))
        build = context or inference_context(config, rules)
        refuse_absent_kernels(config, build)
        loaded = read_adapters(config, adapters)  # an error comes before the weights are loaded
        proposer = load_drafts(config, build, rules, checkpoint)
        if checkpoint is None:
            weights = random_weights(config, template, rules)
            llm = cls(config, template, weights, None, context, loaded, proposer)
        else:
            weights, dtypes = load_weights(config, template, rules, checkpoint, progress)
            llm = cls(config, template, weights, checkpoint, context, loaded, proposer)
            llm.disk_dtypes = dtypes
        if config.save_quantized_params_path:
            llm.save(config.save_quantized_params_path)
        if config.enable_model_warmup:
            llm.warm_up()
        return llm

    def logits(self, token_ids: ArrayLike | Sequence, adapter: str | None = None) -> jax.Array:
        """The logits of the next token at every position: [B, S, V] for token ids [B, S], or [S, V]
        for the ids [S] of one sequence. `adapter` is as in `GenerationRequest`. Raises UserError
        for ids outside the vocabulary."""
        rows = np.asarray(token_ids)
        if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
            raise UserError(
                "token ids must be whole numbers, [batch, length] or [length], "
                f"not {rows.dtype}{rows.shape}"
            )
        self.check_token_ids(rows)
        batch = jnp.atleast_2d(jnp.asarray(rows, jnp.int32))
        ids = jnp.asarray(self.adapters.ids([adapter] * batch.shape[0]))
        with self.programs.context():
            has_adapters = self.programs.build.adapters is not None
            logits = self.programs.forward(self.weights, batch, ids if has_adapters else None)
        return logits if rows.ndim == 2 else logits[0]

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        adapter: str | None | Sequence[str | None] = None,
        **options: Any,
    ) -> Any:
        """Complete one prompt or several. The result has the form of `prompts`:

        - a string: the text of the completion; a list of strings: a list of texts
        - a list of token ids: the new ids; a list of such lists: a list of lists
        - an array of ids [S] or [B, S]: an int32 array of new ids, [N] or [B, N] with N at most
          max_new_tokens; shorter rows are padded with their last id

        With n > 1, each prompt has n results: a list of them, or an axis of the array after the
        batch axis. A completion ends with the model's end-of-sequence token unless `ignore_eos`,
        before the first string of `stop` that appears, after `max_new_tokens`, or when prompt and
        completion have max_target_length tokens together. `adapter` is one name for all prompts, or
        a list with one name for each, as in `GenerationRequest`. `options` are further fields of
        `SamplingParams`, which documents all options. Raises UserError if an option is invalid or a
        prompt cannot be served."""
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=ignore_eos,
            **options,
        )
        is_list = isinstance(prompts, list | tuple)
        is_single = (
            isinstance(prompts, str)
            or (is_list and len(prompts) > 0 and are_token_ids(prompts))
            or (not is_list and np.ndim(prompts) == 1)
        )
        rows = [prompts] if is_single else prompts
        completions = self.complete_all(rows, params, adapter)
        is_text = [isinstance(prompt, str) for prompt in rows for _ in range(params.n)]
        results: Any = [
            completion.text if text else list(completion.token_ids)
            for text, completion in zip(is_text, completions, strict=True)
        ]
        if not isinstance(prompts, str) and not is_list:
            width = max(map(len, results))
            results = np.array([row + row[-1:] * (width - len(row)) for row in results], np.int32)
        if params.n > 1:
            results = [results[i : i + params.n] for i in range(0, len(results), params.n)]
            results = results if isinstance(prompts, str) or is_list else np.stack(results)
        return results[0] if is_single else results

    def complete_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams,
        adapter: str | None | Sequence[str | None] = None,
    ) -> list[Completion]:
        """The `n` completions of each prompt, in order. Raises UserError as `generate` does."""
        requests = []
        prompts = list(prompts)
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
        if len(names) != len(prompts):
            raise UserError(f"give an adapter for each of {len(prompts)} prompts, not {len(names)}")
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                prompt = [int(token) for token in np.atleast_1d(prompt)]
            seed = prompt_seed(params.seed, index)
            requests.append(GenerationRequest(prompt, params.with_valid(seed=seed), names[index]))
        if not requests:
            raise UserError("there are no prompts: give at least one")
        completions = sorted(self.completions(requests), key=lambda each: (each.index, each.choice))
        for completion in completions:
            if completion.error is not None:
                prefix = f"prompt {completion.index}: " if len(prompts) > 1 else ""
                raise UserError(f"{prefix}{completion.error}")
        return completions

    def stream(self, request: GenerationRequest | str, **params: Any) -> Iterator[str]:
        """Yield the completion of one prompt as text deltas. For a text, keywords are fields of
        `SamplingParams`. Raises UserError if the request cannot be served."""
        if isinstance(request, GenerationRequest) and params:
            raise UserError(
                f"a GenerationRequest has its own params: put {', '.join(params)} into them"
            )
        if not isinstance(request, GenerationRequest):
            request = GenerationRequest(request, SamplingParams(**params))
        for text_delta, completion in self.stream_completion(request):
            if completion is not None and completion.error is not None:
                raise UserError(completion.error)
            if text_delta:
                yield text_delta

    def stream_completion(
        self, request: GenerationRequest
    ) -> Iterator[tuple[str, Completion | None]]:
        """Yields (text delta, None) while one request is running, then ("", its completion)."""
        if request.params.n > 1:
            raise RequestError(f"n={request.params.n} completions cannot be one text stream", "n")
        for delta in self.run([request], slots=1, length=self.config.max_target_length):
            yield delta.text, None
            if delta.completion is not None:
                yield "", delta.completion

    def completions(
        self,
        requests: Iterable[GenerationRequest],
        spare_tokens: int = 0,
        memory_fraction: float | None = None,
    ) -> Iterator[Completion]:
        """Yield the `n` completions of each request, in the order in which they finish. A request
        that cannot be served yields one completion with its `error`; the others continue.

        If `requests` is an iterator, it is read as slots become free, and each device runs
        per_device_batch_size sequences at a time. If it is a list and prefix caching is off, more
        sequences may run at a time: as many as fit into `memory_fraction` of the free memory (see
        `Capacity`), with room for `spare_tokens` more tokens each than they need.
        """
        capacity = Capacity.from_config(self.config)
        if isinstance(requests, Sequence) and not self.config.enable_prefix_caching:
            slots, length, *_ = capacity
            requests = [tokenize(request, self.tokenizer) for request in requests]
            lengths = [size for size in map(sequence_length, requests) if size <= length]
            length = min(length, next_power_of_two(max([1, *lengths])))
            wanted = next_power_of_two(max(sum(request.params.n for request in requests), 1))
            limit = self.config.max_num_seqs or max(slots, MAX_SLOTS)
            capacity = Capacity(min(wanted, limit), length + spare_tokens, True, memory_fraction)
        for delta in self.run(requests, *capacity):
            if delta.completion is not None:
                yield delta.completion

    def run(
        self,
        requests: Iterable[GenerationRequest],
        slots: int,
        length: int,
        fits_slots: bool = False,
        memory_fraction: float | None = None,
        expects_requests: bool = False,
    ) -> Iterator[CompletionDelta]:
        """Run requests through the engine of this `Capacity`, and yield the deltas of each step.
        `expects_requests`: use the programs of a server, which expects further requests."""
        source, exhausted = enumerate(requests), False
        engine = self.engine_for(slots, length, fits_slots, memory_fraction)
        with engine.lease(expects_requests):
            session = EngineSession(engine, self.tokenizer)
            while session.has_unfinished or not exhausted:
                while not exhausted and engine.wants_requests:
                    index, request = next(source, (-1, None))
                    if request is None:
                        exhausted = True
                        break
                    try:
                        session.add(index, self.prepare(engine, request))
                    except UserError as error:
                        text = None if self.tokenizer is None else ""
                        failed = Completion(index, (), text, "error", str(error))
                        yield CompletionDelta(index, 0, "", completion=failed)
                yield from session.step()

    def prepare(self, engine: InferenceEngine, request: GenerationRequest) -> PreparedRequest:
        """The request in the form that an engine takes. Raises UserError if it cannot be served."""
        adapter = self.adapters.find(request.adapter)
        prepared = prepare_request(request, self.config, self.tokenizer, self.eos_ids)
        if (reason := engine.reject_reason(prepared)) is not None:
            raise reason
        constraint = request.params.structured_outputs
        grammar = None
        if constraint is not None:
            grammar = self.grammars.matcher(StructuredOutputs.parse(constraint))
        matcher = build_matcher(request.params, grammar, self.tokenizer, self.config.vocab_size)
        return PreparedRequest(prepared, request, adapter, matcher)

    def engine_for(
        self,
        slots: int,
        length: int,
        fits_slots: bool = False,
        memory_fraction: float | None = None,
    ) -> InferenceEngine:
        """The engine of this `Capacity`, reused with its prefix cache until another is needed.
        While it is leased, a second caller gets another engine, which keeps the layout of the
        weights. Raises ConfigError if its caches do not fit in memory."""
        capacity = Capacity(slots, length, fits_slots and slots > 1, memory_fraction)
        refuse_dropped_tokens(self.config)
        if self.engine is not None:
            is_usable = not self.engine.leased and not self.engine.failed
            if self.engine.capacity == capacity and is_usable:
                return self.engine
            self.engine = None  # frees its caches before the next engine allocates its own
        if not any(engine.leased for engine in self.engines):
            self.model.build_for(slots)
        self.engine = InferenceEngine(
            self.programs,
            self.weights,
            *capacity,
            max_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.engines.add(self.engine)
        return self.engine

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Compile the programs that `completions` of an iterator needs for requests that are
        sampled like `params`, which default to the decode_sampling_* keys."""
        capacity = Capacity.from_config(self.config)

        def run(requests: list[GenerationRequest], expects_requests: bool) -> None:
            list(self.run(iter(requests), *capacity, expects_requests=expects_requests))

        params = params or SamplingParams.from_config(self.config)
        warm_up(self.engine_for(*capacity), params, run)

    def save(self, folder: str | os.PathLike, progress: Progress | None = None) -> None:
        """Write the weights unchanged to a native folder, with config.yml and the tokenizer."""
        hf_assets, names = self.origin
        weights = PackedWeights(ModelWeights(self.model.checkpoint_weights, self.param_infos))
        save_native(folder, self.config, weights, hf_assets, names, progress)

    def save_hf(
        self,
        folder: str | os.PathLike,
        dtype: str | None = None,
        progress: Progress | None = None,
        text_only: bool = False,
    ) -> None:
        """Write a Hugging Face folder. Weights are written in `dtype` (for exceptions, see
        `param_dtypes`), by default in the dtypes of the folder that was loaded. Raises ConfigError
        if that folder had vision or audio tensors, unless `text_only`."""
        hf_assets, names = self.origin
        wanted = parse_dtype(dtype)
        dtypes = self.disk_dtypes if wanted is None else param_dtypes(self.param_infos, wanted)
        weights = CastTensors(ModelWeights(self.model.checkpoint_weights, self.param_infos), dtypes)
        save_hf_folder(
            folder,
            self.config,
            self.param_infos,
            weights,
            hf_assets,
            names,
            progress=progress,
            text_only=text_only,
        )

    @property
    def origin(self) -> tuple[tuple[Path, ...], frozenset[str]]:
        """The Hugging Face assets of the checkpoint, and the names of its tensors."""
        if self.checkpoint is None:
            return (), frozenset()
        return self.checkpoint.hf_assets, self.checkpoint.hf_tensor_names

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer at tokenizer_path, if set, otherwise the checkpoint's."""
        if self.config.source("tokenizer_path").is_user:
            return load_tokenizer(self.config)
        return find_tokenizer(self.origin[0])

    @cached_property
    def eos_ids(self) -> list[int]:
        return find_eos_ids(self.origin[0], self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Raises UserError if this model cannot have structured output."""
        if self.tokenizer is None:
            raise RequestError(f"{NO_TOKENIZER}, which structured output needs")
        return GrammarCompiler(self.tokenizer, self.config.vocab_size, self.eos_ids)

    @property
    def programs(self) -> Programs:
        return self.model.programs

    @property
    def weights(self) -> Tree:
        """The weights in the layout of `programs.template`; see `InferenceModel`."""
        return self.model.weights

    def check_token_ids(self, rows: np.ndarray) -> None:
        """Raise UserError for ids outside the vocabulary and for rows that are too long."""
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= self.config.vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary, "
                f"0 to {self.config.vocab_size - 1}"
            )
        check_positions(self.config, rows.shape[-1])
