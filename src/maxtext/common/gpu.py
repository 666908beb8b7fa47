"""The compute capability of this machine's GPU, asked for in one place."""

import functools

import jax

ASSUMED = "9.0"  # Hopper: when a program is compiled for a GPU that this machine does not have


@functools.cache
def gpu_capability() -> str:
    """ "9.0" on Hopper, "gfx942" on an AMD card, empty without a GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def target_capability() -> str:
    """The capability of the GPU that a program is compiled for."""
    return gpu_capability() or ASSUMED


def is_nvidia(capability: str, minimum: tuple[int, int] = (8, 0)) -> bool:
    """Whether it is an NVIDIA GPU of at least this compute capability; AMD's are called gfx…"""
    numbers = capability.split(".")
    return all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) >= minimum
