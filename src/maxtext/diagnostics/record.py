"""What one record is: the numbers of one step, by name, as plain Python numbers.

Every record has `step` (from 0, the step that these numbers belong to). A step of training brings
`loss`, `lm_loss`, `learning_rate`, `grad_norm` (after clipping), `raw_grad_norm` (before),
`param_norm`, `total_weights` (tokens that counted in the loss), the four of TIMING (of which the
speeds are means over about a second of steps), and whatever else the step returned. A record may
also hold only a few of them, such as an evaluation's (`step`, `eval_loss`). None means that a
number is not known.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Record = dict[str, float | int | None]

# What depends on the wall clock. `mfu` is a fraction (0.41) of the device's dense peak for the
# number format used.
TIMING = (
    "step_time_seconds",
    "tokens_per_second_per_device",
    "tflops_per_second_per_device",
    "mfu",
)


def plain(values: Mapping[str, Any]) -> Record:
    """A record of Python numbers from scalars of any library. Reading a device array waits for
    it.
    """
    return {name: plain_number(value) for name, value in values.items()}


def plain_number(value: Any) -> float | int | None:
    if value is None or type(value) in (int, float):
        return value
    array = np.asarray(value)
    if array.shape != ():
        raise TypeError(f"a record holds scalars, got an array of shape {array.shape}")
    return int(array) if array.dtype.kind in "iub" else float(array)
