"""What a model writes after training, by the engine that `LLM.generate` uses."""

from typing import Any

import jax

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import Programs
from maxtext.inference.sampling import Sampling
from maxtext.inference.scheduler import Request
from maxtext.inference.serving import make_scheduler
from maxtext.sharding.state import on_device
from maxtext.tokenizers import Tokenizer, load_tokenizer
from maxtext.trainers.setup import Setup


def check(config: MaxTextConfig) -> None:
    """Refuse before training what could not be sampled after it."""
    tokenizer = load_tokenizer(config)
    if not config.prompt and not config.add_bos:
        raise ConfigError("prompt is empty and add_bos=false: there is nothing to continue")
    length, places = len(prompt_ids(config, tokenizer)), config.trainable_position_size
    if 0 < places <= length:
        raise ConfigError(
            f"prompt has {length} tokens, and trainable_position_size={places} leaves no room after it"
        )


def prompt_ids(config: MaxTextConfig, tokenizer: Tokenizer) -> list[int]:
    begin = [tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []
    return [*begin, *tokenizer.encode(config.prompt)]


def complete(setup: Setup, weights: Any, tokens: int) -> str:
    """The prompt and up to `tokens` more, drawn as the decode_sampling_* keys say."""
    config = setup.config
    tokenizer = load_tokenizer(config)
    ids = prompt_ids(config, tokenizer)
    room = (
        config.trainable_position_size - len(ids) if config.trainable_position_size > 0 else tokens
    )
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    count = min(tokens, room)
    request = Request(tuple(ids), count, Sampling.of(config), config.init_weights_seed, ends)
    weights = jax.device_put(weights, jax.tree.map(on_device, setup.weight_shardings))
    programs = Programs(config, setup.template, setup.rules)
    (new,) = make_scheduler(programs, weights, 1, len(ids) + count).run([request])
    return tokenizer.decode([*ids, *(token for token in new if token not in ends)])
