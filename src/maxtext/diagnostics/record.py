"""A record: the metrics of one step by name, as Python numbers.

Each record has `step`, counted from 0. A training step has `loss`, `lm_loss`, `learning_rate`,
`grad_norm` (after clipping), `raw_grad_norm` (before), `param_norm`, `total_weights` (tokens that
counted in the loss), with prompts `computed_tokens` (prompts included; a prompt that is computed
once for several completions counts once), the four of TIMING (rates are means over about a
second of steps), and all other metrics of the step. A record may have only some of them; that of an
evaluation has `step` and `eval_loss`. None means unknown.
"""

from collections.abc import Mapping

import numpy as np

Record = dict[str, float | int | None]

# Metrics of the wall clock. `mfu` is a fraction (0.41) of the device's dense peak for the dtype.
TIMING = (
    "step_time_seconds",
    "tokens_per_second_per_device",
    "tflops_per_second_per_device",
    "mfu",
)


def to_record(metrics: Mapping[str, object]) -> Record:
    """Convert scalars of any library to Python numbers. Waits for device arrays."""
    return {name: to_python_number(value) for name, value in metrics.items()}


def to_python_number(value: object) -> float | int | None:
    if value is None or (isinstance(value, int | float) and type(value) in (int, float)):
        return value
    array = np.asarray(value)
    if array.shape != ():
        raise TypeError(f"a record holds scalars, got an array of shape {array.shape}")
    return int(array) if array.dtype.kind in "iub" else float(array)
