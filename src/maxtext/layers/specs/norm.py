"""The spec of a norm."""

from dataclasses import dataclass


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
