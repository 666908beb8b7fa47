"""The spec of Gated DeltaNet."""

from dataclasses import dataclass, field

from maxtext.layers.specs.spec import IMPLEMENTATION, MixerSpec

FORMS = ("chunked", "recurrent")


@dataclass(frozen=True)
class GatedDeltaNetSpec(MixerSpec):
    module = "maxtext.layers.gated_delta_net"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    chunk: int = field(metadata=IMPLEMENTATION)  # tokens of a chunk in the chunked form
    norm_epsilon: float
    qk_norm: bool = True  # L2-normalise queries and keys
    # or recurrent, token by token, with the same result
    form: str = field(default="chunked", metadata=IMPLEMENTATION)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {self.form}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def group_size(self) -> int:
        """Value heads for each key head."""
        return self.value_heads // self.key_heads
