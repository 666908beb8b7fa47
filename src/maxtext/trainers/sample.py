"""What a model writes: a plain loop that runs the whole sequence again for every token.

Good enough to look at a model after training; the inference engine has caches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.sharding import use_rules
from maxtext.tokenizers import load_tokenizer
from maxtext.trainers.setup import Setup


def check(config: Any) -> None:
    """Refuse before training what could not be sampled after it."""
    load_tokenizer(config)
    if not config.prompt and not config.add_bos:
        raise ConfigError("prompt is empty and add_bos=false: there is nothing to continue")
    if config.decode_sampling_strategy.value not in ("greedy", "weighted"):
        raise ConfigError(
            f"decode_sampling_strategy={config.decode_sampling_strategy.value} needs the inference engine, which is "
            "not in this version yet: use greedy or weighted"
        )


def complete(setup: Setup, weights: Any, prompt: str, tokens: int) -> str:
    """The prompt and up to `tokens` more, sampled at decode_sampling_temperature (greedy: the likeliest token)."""
    config = setup.config
    tokenizer = load_tokenizer(config)
    length = config.max_target_length
    ids = ([tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []) + tokenizer.encode(prompt)
    greedy = config.decode_sampling_strategy.value == "greedy"

    def next_token(weights: Any, row: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        positions = jnp.arange(length)[None]
        logits = setup.template.bind(weights)(row[None], positions)[0, last].astype(jnp.float32)
        if greedy:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / config.decode_sampling_temperature)

    with use_rules(setup.rules):
        step = jax.jit(next_token)
        for count in range(tokens):
            window = ids[-length:]
            row = np.zeros(length, np.int32)
            row[: len(window)] = window
            chosen = int(step(weights, row, len(window) - 1, jax.random.fold_in(setup.key, count)))
            if chosen == tokenizer.eos_id:
                break
            ids.append(chosen)
    return tokenizer.decode(ids)
