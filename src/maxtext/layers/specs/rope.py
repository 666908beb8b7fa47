"""The spec of rotary position embeddings (RoPE)."""

import math
from dataclasses import dataclass


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
