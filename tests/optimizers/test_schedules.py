"""The learning rate at every step against the formulas of the key's meaning, written out in plain
Python.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.load import base_values
from maxtext.optimizers import learning_rate_schedule

PEAK = 3e-4


def schedule(**settings):
    return learning_rate_schedule(
        base_values().model_copy(update={"learning_rate": PEAK, **settings})
    )


def at_every_step(rate, total):
    """Under jit, and two steps beyond the end."""
    return np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(total + 2, dtype=jnp.int32)))


def cosine(start, end, fraction):
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * fraction))


# Peak 3e-4 in float32: a part in a million of it is a few roundings.
TOLERANCE = {"rtol": 0, "atol": 1e-6 * PEAK}


@pytest.mark.parametrize(
    ("total", "warmup_fraction", "final_fraction"),
    [
        (100, 0.1, 0.1),
        (100, 0.0, 0.0),
        (37, 0.25, 0.5),
        (9, 1.0, 0.1),
        (1, 0.5, 0.1),
        (250, 0.999, 1.0),
    ],
)
def test_cosine(total, warmup_fraction, final_fraction):
    rate = schedule(
        steps=total,
        warmup_steps_fraction=warmup_fraction,
        learning_rate_final_fraction=final_fraction,
    )
    warmup = int(total * warmup_fraction)
    expected = []
    for step in range(total + 2):
        if step >= total:
            expected.append(0.0)
        elif step < warmup:
            expected.append(PEAK * step / warmup)
        else:
            expected.append(cosine(PEAK, PEAK * final_fraction, (step - warmup) / (total - warmup)))
    np.testing.assert_allclose(at_every_step(rate, total), expected, **TOLERANCE)
    # Python numbers work as well as traced ones.
    assert float(rate(total - 1)) == pytest.approx(expected[total - 1], abs=1e-6 * PEAK)


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("total", "warmup_fraction", "decay_fraction", "final_fraction"),
    [
        (100, 0.1, 0.2, 0.1),
        (100, 0.0, 0.3, 0.0),  # no warm-up
        (50, 0.1, 0.0, 0.1),  # no decay: constant, then 0
        (40, 0.5, 0.5, 0.25),  # no constant part
        (30, 0.0, 1.0, 0.0),  # decay only
        (23, 0.13, 0.37, 0.1),
        (3, 0.1, 0.1, 0.1),  # both round to nothing
    ],
)
def test_warmup_stable_decay(style, total, warmup_fraction, decay_fraction, final_fraction):
    rate = schedule(
        lr_schedule_type="wsd",
        wsd_decay_style=style,
        steps=total,
        warmup_steps_fraction=warmup_fraction,
        wsd_decay_steps_fraction=decay_fraction,
        learning_rate_final_fraction=final_fraction,
    )
    warmup, decay, final = (
        int(total * warmup_fraction),
        int(total * decay_fraction),
        PEAK * final_fraction,
    )
    expected = []
    for step in range(total + 2):
        if step >= total:
            expected.append(0.0)
        elif step < warmup:
            expected.append(PEAK * step / warmup)
        elif step < total - decay:
            expected.append(PEAK)
        else:
            part = (step - (total - decay)) / decay
            expected.append(
                PEAK + (final - PEAK) * part if style == "linear" else cosine(PEAK, final, part)
            )
    np.testing.assert_allclose(at_every_step(rate, total), expected, **TOLERANCE)


def test_schedule_steps_override_steps():
    shorter = schedule(steps=80, learning_rate_schedule_steps=40, warmup_steps_fraction=0.0)
    assert float(shorter(20)) == pytest.approx(cosine(PEAK, 0.1 * PEAK, 0.5), rel=1e-6)
    assert float(shorter(40)) == 0.0
    longer = schedule(steps=40, learning_rate_schedule_steps=80, warmup_steps_fraction=0.0)
    assert float(longer(40)) == pytest.approx(cosine(PEAK, 0.1 * PEAK, 0.5), rel=1e-6)


def test_long_warmup_is_exact():
    rate = schedule(steps=150_000)
    for step in (0, 1, 7_500, 14_999, 15_000):
        assert float(rate(step)) == pytest.approx(PEAK * step / 15_000, abs=1e-6 * PEAK)


def test_rejects_impossible_schedules():
    with pytest.raises(ConfigError, match="do not fit in a schedule of 10 steps"):
        schedule(
            lr_schedule_type="wsd",
            steps=10,
            warmup_steps_fraction=0.6,
            wsd_decay_steps_fraction=0.6,
        )
    with pytest.raises(ConfigError, match="has -1 steps"):
        schedule(steps=-1)
