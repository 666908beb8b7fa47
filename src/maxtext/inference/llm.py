"""The Python door: a model with its weights and, where it has one, its tokenizer."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import (
    Checkpoint,
    dtype_of,
    model_param_infos,
    open_checkpoint,
    save_hf_folder,
    save_native,
    with_max_positions,
)
from maxtext.checkpoint.quantized import PackedWeights, load_model, quantized_weight_dtype
from maxtext.checkpoint.tensors import CastTensors, Progress, TensorSource
from maxtext.checkpoint.weights import ModelWeights, ParamInfo, param_dtypes
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path, read_json_object
from maxtext.configs import fields
from maxtext.configs.load import load
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import BLOCK, Programs
from maxtext.inference.sampling import Sampling
from maxtext.inference.scheduler import Request, Scheduler, power, rounded
from maxtext.inference.serving import Serving, make_scheduler, slots_in_memory
from maxtext.inference.text import Answer, Ask
from maxtext.layers.joined import apart, join
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import described, laid_out, quantize_weights
from maxtext.models.transformer import initial_weights, make_template
from maxtext.sharding import AxisRules, make_mesh
from maxtext.sharding.manual import platform
from maxtext.tokenizers import Tokenizer, find_tokenizer, load_tokenizer

MOST_SLOTS = 256  # sequences at a time, of a list of prompts


class LLM:
    """A language model. `LLM.load` makes one; weights live on the mesh that the configuration
    describes.
    """

    def __init__(
        self,
        config: MaxTextConfig,
        template: Template,
        weights: Any,
        checkpoint: Checkpoint | None = None,
    ):
        self.config, self.template, self.weights, self.checkpoint = (
            config,
            template,
            weights,
            checkpoint,
        )
        self.rules = AxisRules.of(config, make_mesh(config))
        self.param_infos = model_param_infos(template, config)
        self.dtypes: dict[str, np.dtype] = {}  # of the weights as they were on disk
        self.last_scheduler: tuple[tuple[int, int], Scheduler] | None = None

    @classmethod
    def load(
        cls, path: str | os.PathLike, progress: Progress | None = None, **config: MaxTextConfig
    ) -> "LLM":
        """From a Hugging Face folder, a folder of ours, or the name of a model, which gives random
        weights.

        Keywords are keys of the configuration: dtype, weight_dtype, attention,
        ici_tensor_parallelism … Layers are unrolled unless scan_layers=True, and weights that are
        bfloat16 on disk stay so unless weight_dtype says else.
        """
        config = {"scan_layers": False} | split_caches(config)
        if local_path(path).is_dir():
            return cls.from_folder(open_checkpoint(path), progress, config)
        names = fields.choices("model_name")
        if str(path) not in names:
            raise ConfigError(
                f"{str(path)!r} is neither a folder nor the name of a model; `maxtext models` lists the names"
            )
        settled = load(None, from_python(config | {"model_name": str(path)}))
        template = make_template(settled)
        rules = AxisRules.of(settled, make_mesh(settled))
        if settled.checkpoint_is_quantized:
            raise ConfigError(
                "checkpoint_is_quantized=true, but a model by its name has no checkpoint: leave the key out"
            )
        dtype = quantized_weight_dtype(settled)
        shardings = rules.shardings(*described(template, dtype))
        make = jax.jit(
            lambda: quantize_weights(template, initial_weights(settled), dtype),
            out_shardings=shardings,
        )
        return cls(settled, template, make()).ready()

    @classmethod
    def from_folder(
        cls, checkpoint: Checkpoint, progress: Progress | None, config: dict[str, Any]
    ) -> "LLM":
        dtypes = {np.dtype(tensor.dtype).name for tensor in checkpoint.source.tensors.values()}
        if dtypes == {"bfloat16"}:
            config = {"weight_dtype": "bfloat16"} | config
        settled, template, param_infos = configured(checkpoint, config)
        source = checkpoint.weights(settled, param_infos)
        if (
            dtypes == {"bfloat16", "float32"}
            and "weight_dtype" not in config
            and is_bfloat16(source, param_infos)
        ):
            settled, template, param_infos = configured(
                checkpoint, config | {"weight_dtype": "bfloat16"}
            )
        rules = AxisRules.of(settled, make_mesh(settled))
        model = cls(
            settled,
            template,
            load_model(source, settled, param_infos, template, rules, progress),
            checkpoint,
        )
        model.dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        return model.ready()

    def ready(self) -> "LLM":
        """Itself, written to save_quantized_params_path and warmed up where the keys say so."""
        if self.config.parameter_memory_host_offload:
            raise ConfigError(
                "parameter_memory_host_offload=true is for training: leave it out when text is generated"
            )
        with self.programs.context():
            self.weights = join(self.template, laid_out(self.template, self.weights))
        if self.config.save_quantized_params_path:
            self.save(self.config.save_quantized_params_path)
        if self.config.enable_model_warmup:
            self.warm_up()
        return self

    def logits(self, ids: Any) -> jax.Array:
        """Token ids [B, S], or [S] of one sequence, to the scores of what follows each of them,
        [..., S, V].
        """
        rows = np.asarray(ids)
        if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
            raise UserError(
                f"token ids must be whole numbers, [batch, length] or [length], not {rows.dtype}{rows.shape}"
            )
        self.check(rows, rows.shape[-1])
        with self.programs.context():
            scores = self.forward(self.weights, jnp.atleast_2d(jnp.asarray(rows, jnp.int32)))
        return scores if rows.ndim == 2 else scores[0]

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
    ) -> Any:
        """What follows the prompts: text for text, a list for a list; for an array of ids [B, S]
        the array of new ids [B, up to max_new_tokens], rows that ended earlier filled up with the
        id that ends them; for lists of ids lists. The ids of a single prompt may stand alone.
        Prompt and answer have max_target_length tokens together at most.

        A row ends with the model's end-of-sequence token, unless `ignore_eos`, and before any of
        the texts in `stop`.
        """
        listed = isinstance(prompts, list | tuple)
        if isinstance(prompts, str) or (listed and prompts and all(map(is_id, prompts))):
            return self.generate(
                [prompts], max_new_tokens, temperature, top_k, top_p, seed, ignore_eos, stop
            )[0]
        if not listed and np.ndim(prompts) == 1:
            whole = np.asarray(prompts)[None]
            return self.generate(
                whole, max_new_tokens, temperature, top_k, top_p, seed, ignore_eos, stop
            )[0]
        rows = [
            row if isinstance(row, str) else [int(token) for token in np.atleast_1d(row)]
            for row in prompts
        ]
        if not rows:
            raise UserError("there are no prompts: give at least one")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_k, top_p)
        asks = [
            Ask(row, max_new_tokens, sampling, seed_of(seed, place), stop, ignore_eos)
            for place, row in enumerate(rows)
        ]
        answers = sorted(self.answers(asks), key=lambda answer: answer.index)
        for answer in answers:
            if answer.error is not None:
                raise UserError(
                    answer.error if len(answers) == 1 else f"prompt {answer.index}: {answer.error}"
                )
        if not listed:
            width = max(len(answer.ids) for answer in answers)
            ids = [list(answer.ids) for answer in answers]
            return np.array([row + row[-1:] * (width - len(row)) for row in ids], np.int32)
        return [
            answer.text if isinstance(row, str) else list(answer.ids)
            for row, answer in zip(rows, answers, strict=True)
        ]

    def stream(self, ask: Ask | str, **keywords: Any) -> Iterator[str]:
        """The text that follows one prompt, piece by piece as it comes. Keywords make an `Ask` of a
        text.
        """
        if isinstance(ask, Ask) and keywords:
            raise UserError(f"an Ask says all: put {', '.join(keywords)} into it")
        asks = iter([ask if isinstance(ask, Ask) else Ask(ask, **keywords)])
        for piece, answer in self.serving(1, self.config.max_target_length).run(asks):
            if answer is not None and answer.error is not None:
                raise UserError(answer.error)
            if piece:
                yield piece

    def answers(self, asks: Iterable[Ask]) -> Iterator[Answer]:
        """What follows each ask, in the order in which they finish. An ask that cannot be served
        has an answer with its error; the others go on. An iterator is read as there is room:
        per_device_batch_size asks of each device are at work at a time. Of a list as many are as
        reasonable, unless known prefixes are to be kept from call to call.
        """
        slots, length = self.config.global_batch_size_to_load, self.config.max_target_length
        if isinstance(asks, Sequence) and not self.config.enable_prefix_caching:
            asks = [self.in_ids(ask) for ask in asks]
            needs = [size for size in map(size_of, asks) if size <= length]
            length = min(length, power(max([1, *needs])))
            slots = slots_in_memory(
                self.programs, min(power(max(len(asks), 1)), max(slots, MOST_SLOTS)), length
            )
        for _, answer in self.serving(slots, length).run(iter(asks)):
            if answer is not None:
                yield answer

    def in_ids(self, ask: Ask) -> Ask:
        """The ask with its prompt as ids, if it can be."""
        if not isinstance(ask.prompt, str) or self.tokenizer is None:
            return ask
        return replace(ask, prompt=self.tokenizer.encode_prompt(ask.prompt))

    def request(self, ask: Ask) -> Request:
        ask = self.in_ids(ask)
        if isinstance(ask.prompt, str):
            raise UserError("this model came without a tokenizer: give token ids instead of text")
        if not isinstance(ask.prompt, Sequence | np.ndarray) or not all(map(is_id, ask.prompt)):
            raise UserError(
                f"a prompt is text or whole numbers, token ids, not {str(ask.prompt)[:80]}"
            )
        if not is_id(ask.max_new_tokens):
            raise UserError(
                f"max_new_tokens={ask.max_new_tokens} must be a whole number of at least 1"
            )
        ids = tuple(int(token) for token in ask.prompt)
        param_infos, length = self.config.trainable_position_size, len(ids) + ask.max_new_tokens
        if 0 < param_infos < length:
            raise UserError(
                f"{length} tokens are more than the {param_infos} positions that this model has learned"
            )
        if ask.stop and self.tokenizer is None:
            raise UserError(
                "this model came without a tokenizer, so no text can stop it: use ids without `stop`"
            )
        ends = () if ask.ignore_eos else tuple(self.end_ids)
        return Request(ids, ask.max_new_tokens, ask.sampling, ask.seed, ends, ask.log_probs)

    def serving(self, slots: int, length: int) -> Serving:
        return Serving(lambda: self.scheduler(slots, length), self.request, self.tokenizer)

    def scheduler(self, slots: int, length: int) -> Scheduler:
        """For so many sequences at a time of such a length, that nobody uses now. The last one is
        kept, with what it knows."""
        if self.config.capacity_factor > 0:
            raise ConfigError(
                f"capacity_factor={self.config.capacity_factor:g} lets experts drop tokens, so that an answer would "
                "depend on what else is at work: leave it out, or set -1"
            )
        at_work = False
        if self.last_scheduler is not None:
            size, last = self.last_scheduler
            if size == (slots, length) and not last.taken and not last.broken:
                return last
            at_work = last.taken
            self.last_scheduler = None  # its memory is needed
            del last
        made = make_scheduler(self.programs, self.weights, slots, length, shared=at_work)
        self.last_scheduler = (slots, length), made
        return made

    def warm_up(self) -> None:
        """Compile what `answers` of an iterator needs for prompts up to max_prefill_predict_length,
        sequences up to max_target_length, and draws as the decode_sampling_* keys say."""
        slots, length = self.config.global_batch_size_to_load, self.config.max_target_length
        longest = min(self.config.max_prefill_predict_length, length - 2)
        sizes = sorted({min(rounded(size), longest) for size in range(1, longest + 1)})
        sizes += [
            size - 1 for size in (power(size) for size in range(longest, length)) if size < length
        ]
        sampling, scored, first = Sampling.of(self.config), self.config.return_log_prob, 0
        rows = self.scheduler(slots, length).engine.row_counts
        for size in dict.fromkeys(sizes):
            counts = {min(1 << place, slots) for place in range(power(slots).bit_length())} | set(
                rows
            )
            for count in sorted(counts):
                asks = []
                # A whole block, and what is left of one, where they are two programs.
                new = 2 if platform(self.programs.rules) == "cpu" else min(BLOCK + 2, length - size)
                for _ in range(count):
                    first += 1  # another beginning each time, so that nothing is known of it
                    ids = [first // self.config.vocab_size % self.config.vocab_size] * size
                    asks.append(
                        Ask(
                            [first % self.config.vocab_size, *ids][:size],
                            new,
                            sampling,
                            0,
                            (),
                            True,
                            scored,
                        )
                    )
                list(self.answers(iter(asks)))

    def save(self, folder: str | os.PathLike, progress: Progress | None = None) -> None:
        """The weights as they are, with config.yml: a folder that `LLM.load` and `maxtext convert`
        take.
        """
        hf_assets, names = self.origin
        weights = PackedWeights(ModelWeights(apart(self.weights), self.param_infos))
        save_native(folder, self.config, weights, hf_assets, names, progress)

    def save_hf(
        self,
        folder: str | os.PathLike,
        dtype: str | None = None,
        progress: Progress | None = None,
        text_only: bool = False,
    ) -> None:
        """A Hugging Face folder. Weights are written in `dtype` (but see `param_dtypes`), or as they
        were in the folder that was loaded. Raises ConfigError if that folder had vision or audio
        tensors, unless `text_only`."""
        hf_assets, names = self.origin
        wanted = dtype_of(dtype)
        dtypes = self.dtypes if wanted is None else param_dtypes(self.param_infos, wanted)
        weights = CastTensors(ModelWeights(apart(self.weights), self.param_infos), dtypes)
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
        return (
            (self.checkpoint.hf_assets, self.checkpoint.hf_tensor_names)
            if self.checkpoint
            else ((), frozenset())
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The one that tokenizer_path names, or that came with the folder."""
        if self.config.source("tokenizer_path").is_user:
            return load_tokenizer(self.config)
        return find_tokenizer(self.origin[0])

    @property
    def known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this model came without a tokenizer: give token ids instead of text")
        return self.tokenizer

    @cached_property
    def end_ids(self) -> list[int]:
        """The ids that end a sequence: generation_config.json's, config.json's, or the
        tokenizer's.
        """
        for name in ("generation_config.json", "config.json"):
            for file in self.origin[0]:
                if file.name == name:
                    listed = read_json_object(file).get("eos_token_id")
                    if listed not in (None, -1):
                        return [listed] if isinstance(listed, int) else list(listed)
        if self.tokenizer is not None and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return []

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.config, self.template, self.rules)

    @cached_property
    def forward(self) -> Any:
        def run(weights: Any, rows: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
            return self.template.bind(weights)(rows, positions)

        return jax.jit(run)

    def check(self, ids: np.ndarray, length: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise UserError(
                f"token id {wrong} is outside the vocabulary, 0 to {self.config.vocab_size - 1}"
            )
        param_infos = self.config.trainable_position_size
        if 0 < param_infos < length:
            raise UserError(
                f"{length} tokens are more than the {param_infos} positions that this model has learned"
            )


def configured(
    checkpoint: Checkpoint, keys: dict[str, Any]
) -> tuple[Any, Template, dict[str, ParamInfo]]:
    """The configuration of a folder's model with these keys, its template, and its weights by
    name.
    """
    config = load(
        None, from_python(with_max_positions(checkpoint.settings, keys)), model=checkpoint.settings
    )
    template = make_template(config)
    return config, template, model_param_infos(template, config)


def is_bfloat16(source: TensorSource, param_infos: Mapping[str, ParamInfo]) -> bool:
    """Whether all weights are bfloat16, apart from those that no model has in it."""
    kinds = {
        tensor.dtype.name
        for name, tensor in source.tensors.items()
        if not param_infos[name].fixed_dtype
    }
    return kinds == {"bfloat16"}


def split_caches(config: dict[str, Any]) -> dict[str, Any]:
    """The keys, with the rule by which context_autoregressive devices share the length of caches,
    if there are any.
    """
    devices = [
        config.get(f"{kind}_context_autoregressive_parallelism", 1) for kind in ("ici", "dcn")
    ]
    if "logical_axis_rules" in config or devices == [1, 1]:
        return config
    return config | {"logical_axis_rules": [["cache_sequence", ["context_autoregressive"]]]}


def size_of(ask: Ask) -> int:
    """Tokens of prompt and answer, of an ask in ids; 0 of what will be refused."""
    right = isinstance(ask.prompt, Sequence | np.ndarray) and not isinstance(ask.prompt, str)
    return (
        len(ask.prompt) + ask.max_new_tokens if right and isinstance(ask.max_new_tokens, int) else 0
    )


def is_id(token: Any) -> bool:
    return isinstance(token, int | np.integer)


def seed_of(seed: int, place: int) -> int:
    """Of the prompt at a place of a list. The first has the seed itself, as if it were alone."""
    return (
        seed
        if place == 0
        else int(np.random.SeedSequence([seed % 2**32, place]).generate_state(1)[0])
    )
