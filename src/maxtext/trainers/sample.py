"""What a model writes after training, by the same generator that `LLM.generate` uses."""

from typing import Any

import jax

from maxtext.common.errors import ConfigError
from maxtext.inference.generate import extend, make_generator, scorer
from maxtext.inference.sampling import Sampling
from maxtext.sharding import use_rules
from maxtext.sharding.state import on_device
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
    ids = ([tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []) + tokenizer.encode(prompt)
    greedy = config.decode_sampling_strategy.value == "greedy"
    sampling = Sampling(0.0 if greedy else config.decode_sampling_temperature)
    room = max(config.trainable_position_size - len(ids), 0) if config.trainable_position_size > 0 else tokens
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    weights = jax.device_put(weights, jax.tree.map(on_device, setup.weight_shardings))
    with use_rules(setup.rules), jax.default_matmul_precision(config.matmul_precision.value):
        generate = make_generator(scorer(config, setup.template), sampling)
        (new,) = extend(generate, weights, [ids], min(tokens, room), config.init_weights_seed, ends)
    return tokenizer.decode([*ids, *(token for token in new if token not in ends)])
