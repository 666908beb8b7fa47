"""Tolerances from the reference's own rounding error: the difference of its float32 and float64
results.

A bound measured on one machine fails on another, whose matmuls sum in another order. An
implementation in float32 is allowed a small multiple of the reference's rounding error for the same
inputs.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

FACTOR = 16  # for another order of summation
ULP = float(np.finfo(np.float32).eps)


def rounding_noise(float32: Any, float64: Any) -> float:
    """The largest difference of the two results, at least one ULP of the largest value."""
    float32, float64 = np.asarray(float32, np.float64), np.asarray(float64, np.float64)
    return max(float(np.abs(float32 - float64).max()), ULP * float(np.abs(float64).max()))


def assert_within_rounding(
    actual: Any, float32: Any, float64: Any, factor: float = FACTOR, name: str = ""
) -> None:
    """|actual - float64| <= factor x the reference's noise, for all elements."""
    bound = factor * rounding_noise(float32, float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), float64, rtol=0, atol=bound, err_msg=name
    )


def in_both_precisions(
    module: torch.nn.Module, run: Callable[[torch.nn.Module], Any]
) -> tuple[Any, Any]:
    """`run(module)` in float32, and for a copy in float64. `run` creates tensors of the module's
    dtype.
    """
    double = copy.deepcopy(module).double()
    expected = run(module)
    with float64_inside(module):
        return expected, run(double)


def dtype_of(module: torch.nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


@contextlib.contextmanager
def float64_inside(module: torch.nn.Module) -> Iterator[None]:
    """Compute in float64 also where the module casts to float32: inside, `torch.float32` and
    `Tensor.float` mean float64.
    """
    files = {sys.modules[type(part).__module__] for part in module.modules()}
    with contextlib.ExitStack() as stack:
        for file in files:
            if getattr(file, "torch", None) is torch and not file.__name__.startswith("torch."):
                stack.enter_context(mock.patch.object(file, "torch", _Float64Torch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


class _Float64Torch:
    """The torch package, with float64 in place of float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)
