"""The Python door: a model with its weights and, where it has one, its tokenizer."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import (
    Checkpoint,
    dtype_of,
    open_checkpoint,
    places_of,
    save_ours,
    save_theirs,
    within_positions,
)
from maxtext.checkpoint.tensors import Progress, Recast
from maxtext.checkpoint.weights import ModelWeights, load_weights
from maxtext.common.errors import ConfigError, UserError
from maxtext.configs import fields
from maxtext.configs.load import load
from maxtext.configs.sources import from_python
from maxtext.inference.generate import extend, make_generator, scorer
from maxtext.inference.sampling import Sampling
from maxtext.layers.parameters import Template
from maxtext.models.transformer import initial_weights, make_template
from maxtext.sharding import AxisRules, make_mesh, use_rules
from maxtext.tokenizers import Tokenizer, find_tokenizer

Ids = Sequence[int]


class LLM:
    """A language model. `LLM.load` makes one; weights live on the mesh that the configuration describes."""

    def __init__(self, config: Any, template: Template, weights: Any, checkpoint: Checkpoint | None = None):
        self.config, self.template, self.weights, self.checkpoint = config, template, weights, checkpoint
        self.rules = AxisRules.of(config, make_mesh(config))
        self.places = places_of(template, config)
        self.dtypes: dict[str, np.dtype] = {}  # of the weights as they were on disk

    @classmethod
    def load(cls, path: str | os.PathLike, progress: Progress | None = None, **config: Any) -> "LLM":
        """From a Hugging Face folder, a folder of ours, or the name of a model, which gives random weights.

        Keywords are keys of the configuration: dtype, weight_dtype, attention, ici_tensor_parallelism …
        """
        if Path(path).expanduser().is_dir():
            return cls.from_folder(open_checkpoint(path), progress, config)
        names = fields.choices("model_name")
        if str(path) not in names:
            raise ConfigError(
                f"{str(path)!r} is neither a folder nor the name of a model; `maxtext models` lists the names"
            )
        settled = load(None, from_python(config | {"model_name": str(path)}))
        template = make_template(settled)
        rules = AxisRules.of(settled, make_mesh(settled))
        shardings = rules.shardings(template.axes, template.weights)
        return cls(settled, template, jax.jit(lambda: initial_weights(settled), out_shardings=shardings)())

    @classmethod
    def from_folder(cls, checkpoint: Checkpoint, progress: Progress | None, config: dict[str, Any]) -> "LLM":
        keys = from_python(within_positions(checkpoint.settings, config))
        settled = load(None, keys, model=checkpoint.settings)
        template = make_template(settled)
        rules = AxisRules.of(settled, make_mesh(settled))
        places = places_of(template, settled)
        source = checkpoint.weights(settled, places)
        shardings = rules.shardings(template.axes, template.weights)
        model = cls(settled, template, load_weights(source, places, template, shardings, progress=progress), checkpoint)
        model.dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        return model

    def logits(self, ids: Any) -> jax.Array:
        """Token ids [B, S], or [S] of one sequence, to the scores of what follows each of them, [..., S, V]."""
        rows = np.asarray(ids)
        if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
            raise UserError(
                f"token ids must be whole numbers, [batch, length] or [length], not {rows.dtype}{rows.shape}"
            )
        self.check(rows, rows.shape[-1])
        with self.context():
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
    ) -> Any:
        """What follows the prompts: text for text, a list for a list; for an array of ids [B, S] the array of new ids
        [B, up to max_new_tokens], rows that ended earlier filled up with the id that ends them; for lists of ids lists.

        A row ends with the model's end-of-sequence token, unless `ignore_eos`.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
        if isinstance(prompts, str):
            return self.generate([prompts], max_new_tokens, temperature, top_k, top_p, seed, ignore_eos)[0]
        as_text = isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], str)
        as_lists = isinstance(prompts, list | tuple) and not as_text
        if as_text:
            rows = [self.known_tokenizer.encode_prompt(prompt) for prompt in prompts]
        else:
            rows = [[int(token) for token in np.atleast_1d(row)] for row in prompts]
        if not rows or any(not row for row in rows):
            raise UserError("a prompt is empty: there is nothing to continue")
        for row in rows:
            self.check(np.asarray(row), len(row) + max_new_tokens)
        ends = [] if ignore_eos else self.end_ids
        new = self.extend(rows, max_new_tokens, Sampling(temperature, top_k, top_p), seed, ends)
        if as_text:
            return [self.continuation(row, more) for row, more in zip(rows, new, strict=True)]
        if as_lists:
            return new
        width = max(map(len, new))
        return np.array([row + row[-1:] * (width - len(row)) for row in new], np.int32)

    def extend(self, rows: list[list[int]], count: int, sampling: Sampling, seed: int, ends: Ids) -> list[list[int]]:
        """The new ids of each row."""
        if sampling not in self.generators:
            self.generators[sampling] = make_generator(scorer(self.config, self.template), sampling)
        with self.context():
            return extend(self.generators[sampling], self.weights, rows, count, seed, ends)

    def continuation(self, prompt: Ids, new: Ids) -> str:
        """What new ids add to the text of a prompt; in many vocabularies a word's token alone has lost its space."""
        before, whole = (self.known_tokenizer.decode(ids) for ids in (prompt, [*prompt, *new]))
        return whole[len(before) :] if whole.startswith(before) else self.known_tokenizer.decode(new)

    def save(self, folder: str | os.PathLike, progress: Progress | None = None) -> None:
        """The weights as they are, with config.yml: a folder that `LLM.load` and `maxtext convert` take."""
        carried, names = self.origin
        save_ours(folder, self.config, ModelWeights(self.weights, self.places), carried, names, progress)

    def save_hf(self, folder: str | os.PathLike, dtype: str | None = None, progress: Progress | None = None) -> None:
        """A Hugging Face folder. Weights are written in `dtype`, or as they were in the folder that was loaded."""
        carried, names = self.origin
        wanted = dtype_of(dtype)
        dtypes = self.dtypes if wanted is None else dict.fromkeys(self.places, wanted)
        weights = Recast(ModelWeights(self.weights, self.places), dtypes)
        save_theirs(folder, self.config, self.places, weights, carried, names, progress)

    @property
    def origin(self) -> tuple[tuple[Path, ...], frozenset[str]]:
        return (self.checkpoint.carried, self.checkpoint.names) if self.checkpoint else ((), frozenset())

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return find_tokenizer(self.origin[0])

    @property
    def known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this model came without a tokenizer: give token ids instead of text")
        return self.tokenizer

    @cached_property
    def end_ids(self) -> list[int]:
        """The ids that end a sequence: generation_config.json's, config.json's, or the tokenizer's."""
        for name in ("generation_config.json", "config.json"):
            for file in self.origin[0]:
                if file.name == name:
                    listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                    if listed is not None:
                        return [listed] if isinstance(listed, int) else list(listed)
        if self.tokenizer is not None and self.tokenizer.eos_id is not None:
            return [self.tokenizer.eos_id]
        return []

    @cached_property
    def generators(self) -> dict[Sampling, Any]:
        return {}

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
            raise UserError(f"token id {wrong} is outside the vocabulary, 0 to {self.config.vocab_size - 1}")
        places = self.config.trainable_position_size
        if 0 < places < length:
            raise UserError(f"{length} tokens are more than the {places} positions that this model has learned")

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """While a program is traced: how it is laid out, and how precisely it multiplies."""
        with use_rules(self.rules), jax.default_matmul_precision(self.config.matmul_precision.value):
            yield
