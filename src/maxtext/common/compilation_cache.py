"""The persistent cache of compiled programs."""

MIN_COMPILE_SECONDS = 0.1  # of a program that is worth a file
FOLDER, ENABLED = "jax_compilation_cache_dir", "jax_enable_compilation_cache"


def use_compilation_cache(folder: str | None, is_chosen: bool) -> None:
    """Read and write compiled programs in `folder`, so that a second start skips compiling. None or
    "" disables the cache.

    `is_chosen`: the user named the folder. A default folder does not replace a cache that JAX
    already has, and does not enable one that the user has disabled.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # Type checkers do not know the flags as attributes.
    current, is_enabled = (getattr(jax.config, flag) for flag in (FOLDER, ENABLED))
    if not is_chosen and (current or not folder or not is_enabled):
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    if folder:
        jax.config.update(ENABLED, True)
    if (folder or None) != current:
        jax.config.update(FOLDER, folder or None)
        compilation_cache.reset_cache()  # JAX would keep the folder of its first program
