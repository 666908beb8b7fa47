"""Kernels of ours for NVIDIA GPUs, by Triton, whose programs read rows whole: whether they are used, and how rows are
cut.

`MAXTEXT_KERNELS=plain` in the environment leaves to the compiler what it can do, too: norms, losses, and
rounding.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

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


def run_by_rows(
    program: Callable[..., None], matrices: Sequence[jax.Array], columns: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct], more: int, interpret: bool, name: str,
) -> list[jax.Array]:  # fmt: skip
    """Runs it on some rows of all matrices [T, C], or [T], and all of `columns` [C]; it writes those of `outs` [T, C],
    and of as many [T], in float32, as `more` says."""
    lines = len(matrices[0])
    some, warps = program_size(max(sum(x.size // lines for x in arrays) for arrays in (matrices, outs)))

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((some, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))

    return pl.pallas_call(
        program,
        out_shape=[*outs, *[jax.ShapeDtypeStruct((lines,), jnp.float32)] * more],
        grid=(lines // some,),
        in_specs=[*map(whole, matrices), *(pl.BlockSpec(x.shape, lambda i: (0,)) for x in columns)],
        out_specs=[*map(whole, outs), *[pl.BlockSpec((some,), lambda i: (i,))] * more],
        compiler_params=triton.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=name,
    )(*matrices, *columns)


def program_size(longest: int) -> tuple[int, int]:
    """How many rows of so many numbers a program has, and how many warps."""
    some = max(1, TOGETHER // down_to_power(longest))
    return some, min(16, max(4, down_to_power(some * longest // 1536)))


def parts(width: int, most: int = LONGEST) -> list[Any]:
    """Of a row: their sizes are powers of two up to `most`, as Triton wants them, the longest first."""
    found, start = [], 0
    while start < width:
        size = min(down_to_power(width - start), most)
        found.append(pl.ds(start, size))
        start += size
    return found


def down_to_power(x: int) -> int:
    """The largest power of two that is not above x."""
    return 1 << (max(x, 1).bit_length() - 1)
