"""The base classes of layer specs.

A spec is a frozen dataclass that describes a layer. It imports no JAX, so that configurations are
resolved, checked against their layers and compared without it.

Also the specs of norms and of rotary position embeddings (RoPE).
"""

import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from maxtext.layers.cache import CacheConfig
    from maxtext.layers.parameters import Initializer

# Metadata of a field that chooses how a layer computes its output, or that only training uses:
# specs that differ in such fields alone compute the same from the same weights.
IMPLEMENTATION = {"affects_output": False}


class Spec:
    """`module` names the Python module that creates the layer, by its `build(spec, initializer,
    ...)`. It imports JAX, so it is imported when the first layer is built.
    """

    module: ClassVar[str]

    @classmethod
    def import_module(cls) -> ModuleType:
        return importlib.import_module(cls.module)

    def build(self, initializer: "Initializer", *args: Any) -> Any:
        return self.import_module().build(self, initializer, *args)


class MixerSpec(Spec):
    """A token mixer. `empty_cache(spec, cache_config)` of its module creates the cache."""

    def cache(self, cache_config: "CacheConfig") -> Any:
        """An empty cache; None if the layer recomputes all tokens."""
        return self.import_module().empty_cache(self, cache_config)


@dataclass(frozen=True)
class NormSpec:
    """`kind`: rms, or layer (the mean is subtracted). `offset`: the stored scale is added to 1.

    `scaled=False` leaves out the scale, `bias=False` the bias of a layer norm.
    """

    kind: str = "rms"
    epsilon: float = 1e-5
    offset: bool = False
    scaled: bool = True
    bias: bool = True  # of kind layer


@dataclass(frozen=True)
class RopeSpec:
    """`kind`: default; llama3.1 (low frequencies divided by `factor`, with a smooth transition);
    yarn (interpolation by parts, with a temperature on the attention); longrope (a divisor for each
    pair, from one of two lists by the length of sequences). `linear_factor` divides all
    frequencies. With `fraction` < 1 only the first dimensions of a head rotate; `proportional`: the
    pairs and frequencies are those of the whole head, and the last pairs do not rotate.
    """

    kind: str = "default"
    max_timescale: float = 10_000.0
    min_timescale: float = 1.0
    fraction: float = 1.0
    proportional: bool = False
    linear_factor: float = 1.0
    interleave: bool = False  # pairs are neighbours (0,1), (2,3) … instead of halves (0, D/2) …
    factor: float = 1.0  # how much longer than `original_length` sequences may be
    original_length: int = 8192
    low_frequency_factor: float = 1.0  # llama3.1
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: bool = False  # yarn: multiply cos and sin by 0.1 ln(factor) + 1
    attention_factor: float | None = None  # … or by this
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, one a pair
    long_factors: tuple[float, ...] = ()
    long: bool = False  # longrope: sequences are longer than `original_length`

    def rotated(self, head_dim: int) -> int:
        """The number of rotated dimensions of a head."""
        return head_dim if self.proportional else int(head_dim * self.fraction)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn" and self.attention_scaling and self.factor > 1:
            return 0.1 * math.log(self.factor) + 1.0
        return 1.0
