"""`maxtext train`: pre-training from a configuration."""

import os

from maxtext.cli import words as cli_words
from maxtext.common import log
from maxtext.configs import ledger, load, sources
from maxtext.configs.load import base_values, wanted

SAMPLE_TOKENS = 300


def run(words: list[str]) -> int:
    path, settings = cli_words.split(words)
    config = load(path, settings, model=checkpoint_model(path, sources.from_words(settings)))
    ledger.refuse_silent(config, base_values())
    log.configure()
    set_up_jax(config)
    from maxtext.trainers import sample
    from maxtext.trainers.pretrain import train

    continues = config.prompt != base_values().prompt
    if continues:
        sample.check(config)
    result = train(config)
    if continues and result.summary["steps"] == config.steps:
        print(f"\nwhat the model writes after {config.prompt!r}:\n")
        print(sample.complete(result.setup, result.state.weights, config.prompt, SAMPLE_TOKENS))
    return 0


def checkpoint_model(path: str | None, words: sources.Layer) -> sources.Layer | None:
    """What the checkpoint that a run starts from says of its model; nothing where model_name says it."""
    folder = wanted("load_parameters_path", path, words, os.environ)
    if not folder or wanted("model_name", path, words, os.environ) not in (None, "default"):
        return None
    from maxtext.checkpoint.open import open_checkpoint

    return open_checkpoint(folder).settings


def set_up_jax(config) -> None:
    """The persistent compilation cache, so that a second start skips compiling."""
    import jax

    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.jax_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
