"""A trained reward model, which scores prompts with their completions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.checkpoint.open import model_param_infos, open_checkpoint
from maxtext.checkpoint.weights import load_weights
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Tree
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import Split
from maxtext.input_pipeline.encode_rows import ScoredPairEncoder
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template
from maxtext.tokenizers.chat import Messages
from maxtext.trainers.methods.reward.objective import last_scores

ROWS = 8  # that are scored at a time
SHORTEST = 64  # tokens of a row; longer ones have powers of two, so that few programs are compiled


@dataclass(frozen=True)
class RewardModel:
    """On one device, in the dtype of its configuration."""

    config: MaxTextConfig
    template: Template
    weights: Tree

    @classmethod
    def load(
        cls, path: str | os.PathLike, tokenizer_path: str = "", **keys: object
    ) -> "RewardModel":
        """A folder that `maxtext reward` or transformers wrote, or the checkpoints of a run.
        `tokenizer_path`: for a folder without a tokenizer. `keys`: configuration keys. Raises
        ConfigError if it holds no reward model."""
        checkpoint = open_checkpoint(path)
        if tokenizer_path and "tokenizer_path" not in checkpoint.model_layer:
            keys["tokenizer_path"] = tokenizer_path
        config = load(
            None,
            from_python({"max_target_length": 2 * SHORTEST, **keys}),
            model=checkpoint.model_layer,
        )
        if not config.num_labels:
            raise ConfigError(
                f"{path} is a language model, not a reward model; `maxtext reward` trains one"
            )
        template = make_template(config)
        param_infos = model_param_infos(template, config)
        weights = load_weights(checkpoint.weights(config, param_infos), param_infos, template)
        return cls(config, template, weights)

    def score(self, prompts: Sequence[str | Messages], completions: Sequence[str]) -> list[float]:
        """The reward of each completion of a prompt, which is a text or a list of messages. Raises
        UserError for messages if the tokenizer has no chat template."""
        pairs = zip(prompts, completions, strict=True)
        rows = [self.token_ids(prompt, completion) for prompt, completion in pairs]
        scores: list[float] = []
        for start in range(0, len(rows), ROWS):
            scores += self.score_rows(rows[start : start + ROWS])
        return scores

    def token_ids(self, prompt: str | Messages, completion: str) -> list[int]:
        """The tokens that training reads of a pair with this completion."""
        encoder = self.encoder
        if isinstance(prompt, str):
            ids = encoder.with_end(encoder.text_ids(prompt + completion))
        else:
            messages = [*prompt, {"role": "assistant", "content": completion}]
            ids = encoder.tokenizer.encode_with_specials(encoder.template.render(messages))
        positions = self.config.trainable_position_size
        if 0 < positions < len(ids):
            raise UserError(
                f"a completion with its prompt has {len(ids)} tokens, and the reward model has "
                f"{positions} positions: lower max_target_length"
            )
        return ids

    def score_rows(self, rows: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, rows))
        length = max(SHORTEST, 1 << (longest - 1).bit_length())
        if self.config.trainable_position_size > 0:
            length = min(length, self.config.trainable_position_size)
        ids = np.zeros((ROWS, length), np.int32)
        lengths = np.ones((ROWS, 1), np.int32)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        return np.asarray(self.program(self.weights, ids, lengths))[: len(rows)].tolist()

    @cached_property
    def encoder(self) -> ScoredPairEncoder:
        return ScoredPairEncoder(self.config, Split.TRAIN)

    @cached_property
    def program(self) -> Callable[[Tree, np.ndarray, np.ndarray], jax.Array]:
        def run(weights: Tree, ids: jax.Array, lengths: jax.Array) -> jax.Array:
            model = self.template.bind(weights)
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            x, _ = model.run(ids, LayerInputs(positions))
            is_token = (positions < lengths).astype(jnp.int32)
            rows = {"inputs_segmentation": is_token, "inputs_position": positions}
            return last_scores(model, x, rows)

        return jax.jit(run)
