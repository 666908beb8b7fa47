"""Kernels of ours for NVIDIA GPUs, by Triton, whose programs read rows whole: whether they are used, and how rows are
cut.

`MAXTEXT_KERNELS=plain` in the environment leaves to the compiler what it can do, too: norms going back, and rounding.
"""

import os
from typing import Any

from jax.experimental import pallas as pl

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import gpu_capability

TILE = 128  # which rows, and the numbers of a row, must be a multiple of
LONGEST = 32768  # numbers of a row that fit into a program's registers
TOGETHER = 4096  # numbers that a program should have at least


def ours(platform: str | None, least: tuple[int, int] = (8, 0)) -> bool:
    """Whether to use them on a platform, if it has a GPU of this compute capability at least."""
    number = (gpu_capability() or "9.0").split(".")  # not known when compiling for a machine that is not here
    able = platform == "gpu" and all(map(str.isdigit, number)) and tuple(map(int, number)) >= least
    chosen = os.environ.get("MAXTEXT_KERNELS", "")
    if chosen not in ("", "plain"):
        raise ConfigError(f"MAXTEXT_KERNELS={chosen} in the environment is not known: say plain, or leave it out")
    return able and not chosen


def program_size(longest: int) -> tuple[int, int]:
    """How many rows of so many numbers a program has, and how many warps."""
    some = max(1, TOGETHER // down_to_power(longest))
    return some, min(16, max(4, down_to_power(some * longest // 2048)))


def parts(width: int) -> list[Any]:
    """Of a row: their sizes are powers of two, as Triton wants them, the longest first."""
    found, start = [], 0
    while start < width:
        size = down_to_power(width - start)
        found.append(pl.ds(start, size))
        start += size
    return found


def down_to_power(x: int) -> int:
    """The largest power of two that is not above x."""
    return 1 << (max(x, 1).bit_length() - 1)
