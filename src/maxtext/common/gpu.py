"""The compute capability of this machine's GPU."""

import functools

import jax

DEFAULT_CAPABILITY = "9.0"  # Hopper, when compiling for a GPU that this machine does not have


@functools.cache
def gpu_capability() -> str:
    """ "9.0" on Hopper, "gfx942" on an AMD card, empty without a GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def target_capability() -> str:
    """The capability of the GPU that a program is compiled for."""
    return gpu_capability() or DEFAULT_CAPABILITY


def is_nvidia(capability: str, minimum: tuple[int, int] = (8, 0)) -> bool:
    """Whether it is an NVIDIA GPU of at least this compute capability (AMD's are named gfx…)."""
    version = capability.split(".")
    return all(map(str.isdigit, version)) and tuple(map(int, version)) >= minimum
