"""The persistent cache of compiled programs."""

MIN_COMPILE_SECONDS = 0.1  # of a program that is worth a file


def use_compilation_cache(folder: str | None) -> None:
    """Read and write compiled programs in `folder`, so that a second start skips compiling."""
    import jax

    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
