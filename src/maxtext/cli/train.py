"""`maxtext train`: pre-training from a configuration."""

from maxtext.cli import words as cli_words
from maxtext.common import log
from maxtext.configs import ledger, load
from maxtext.configs.load import base_values

SAMPLE_TOKENS = 300


def run(words: list[str]) -> int:
    path, settings = cli_words.split(words)
    config = load(path, settings)
    ledger.refuse_silent(config, base_values())
    log.configure()
    set_up_jax(config)
    from maxtext.trainers.pretrain import train
    from maxtext.trainers.sample import complete

    result = train(config)
    if config.source("prompt").kind != "default":
        print(f"\nwhat the model writes after {config.prompt!r}:\n")
        print(complete(result.setup, result.state.weights, config.prompt, SAMPLE_TOKENS))
    return 0


def set_up_jax(config) -> None:
    """The persistent compilation cache, so that a second start skips compiling."""
    import jax

    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.jax_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
