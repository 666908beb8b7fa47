"""The context in which a model is built: the devices, the precision and the mode, by which each
layer chooses its implementation once.

An implementation is a class with `name`, `mode` (the only mode that it is for, or None) and
`unsupported_reason(spec, context)`, which returns None if it supports the spec. A table lists them,
the fastest first; `choose` takes the first that supports a spec, and keeps the reasons of the
others, so that a run's banner can show them. Layers never ask at call time what hardware they run
on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.hardware import is_nvidia, target_capability
from maxtext.kernels.weight_matmul import EIGHT_BIT
from maxtext.kernels.weight_only import FP8
from maxtext.layers.adapters import AdapterSpec
from maxtext.sharding.rules import AxisRules

TRAIN, INFERENCE = "train", "inference"


@dataclass(frozen=True)
class BuildContext:
    """The default builds the reference implementations, on any platform."""

    platform: str = "cpu"  # of the devices of the mesh: cpu, gpu or tpu
    num_devices: int = 1
    capability: str = ""  # compute capability of a GPU: "9.0" is Hopper
    mode: str = TRAIN
    dtype: str = "float32"  # of activations
    weight_dtype: str = "float32"
    precision: str = ""  # of matmuls in training: fp8 or int8; empty: the dtype of the activations
    quantized_weights: str = ""  # their format, as in `kernels/weight_only.py`; empty: floats
    scanned: bool = False  # the weights of equal layers are stacked
    decode_rows: int = 0  # sequences that a decode step extends; 0: any number
    copies_weights: bool = False  # packed weights are copies, for decode programs only
    adapters: AdapterSpec | None = None  # low-rank adapters, which freeze all other weights

    @classmethod
    def from_rules(cls, rules: AxisRules, **options: Any) -> "BuildContext":
        """For the devices of a mesh, which need not be this machine's.

        An abstract mesh, whose devices are unknown, gets the reference implementations.
        """
        is_abstract = isinstance(rules.mesh, jax.sharding.AbstractMesh)
        platform = cls.platform if is_abstract else rules.mesh.devices.flat[0].platform
        capability = target_capability() if platform == "gpu" else ""
        # A mesh of one device may stand for one of several, whose programs are estimated.
        num_devices = max(rules.mesh.size, 2 if rules.one_of_several else 1)
        return cls(platform, num_devices, capability, **options)

    @property
    def only_platform(self) -> str | None:
        """The platform, if there is one device; kernels for single devices ask for it."""
        return self.platform if self.num_devices == 1 else None

    def eight_bit_unsupported_reason(self, dtype: DTypeLike | None = None) -> str | None:
        """Why matmuls in `dtype`, by default the context's, do not quantize many rows to multiply
        them by quantized weights; None if they do."""
        dtype = jnp.dtype(dtype or self.dtype)
        if self.mode != INFERENCE or self.adapters is not None:
            return "activations are quantized for inference without adapters only"
        if self.quantized_weights not in EIGHT_BIT:
            return f"{self.quantized_weights} weights have no 8-bit products"
        if dtype.itemsize != 2:
            return f"{dtype.name} asks for more precision"
        if self.quantized_weights == FP8 and self.platform != "cpu":
            if self.platform != "gpu":
                return f"a {self.platform.upper()} has no fp8 products"
            if not is_nvidia(self.capability, (8, 9)):
                return f"fp8 products need compute capability 8.9, not {self.capability}"
        return None

    def single_gpu_unsupported_reason(self, minimum: tuple[int, int] = (8, 0)) -> str | None:
        """Why a kernel for one NVIDIA GPU of at least this compute capability does not run; None if
        it does.
        """
        if self.platform != "gpu":
            return f"needs an NVIDIA GPU, not a {self.platform.upper()}"
        if not is_nvidia(self.capability, minimum):
            return f"needs compute capability {minimum[0]}.{minimum[1]}, not {self.capability}"
        return None if self.num_devices == 1 else f"needs one GPU, not {self.num_devices}"


REFERENCE = BuildContext()


@dataclass(frozen=True)
class Choice:
    implementation: Any
    rejected: tuple[tuple[str, str], ...]  # faster implementations, each with its reason


def choose(table: Sequence[Any], spec: Any, context: BuildContext) -> Choice:
    """The first implementation of the table for the context's mode that supports the spec."""
    rejected: list[tuple[str, str]] = []
    for implementation in table:
        if implementation.mode not in (None, context.mode):
            continue
        reason = implementation.unsupported_reason(spec, context)
        if reason is None:
            return Choice(implementation, tuple(rejected))
        rejected.append((implementation.name, reason))
    raise ValueError(f"no implementation supports {spec}: {rejected}")


def describe_choices(choices: Sequence[Choice]) -> str:
    """For a banner: "32 of 32 fp8 fused", or with the reason why the fastest was not chosen:
    "32 of 32 plain (not fp8 fused: needs an NVIDIA GPU, not a CPU)"."""
    descriptions = []
    for choice in dict.fromkeys(choices):
        text = f"{choices.count(choice)} of {len(choices)} {choice.implementation.name}"
        if choice.rejected:
            name, reason = choice.rejected[0]
            text += f" (not {name}: {reason})"
        descriptions.append(text)
    return ", ".join(descriptions)
