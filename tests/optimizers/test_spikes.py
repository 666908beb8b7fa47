"""Skipping of spikes against a simulation that keeps plain lists and asks numpy for mean and
deviation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.load import base_values
from maxtext.optimizers import build_optimizer

AXES = {"w": ("embed", "mlp"), "frozen": ("norm",)}
RATE = 0.1


def config_with(**settings):
    constant = {
        "lr_schedule_type": "wsd",
        "wsd_decay_steps_fraction": 0.0,
        "warmup_steps_fraction": 0.0,
    }
    skipping = {
        "skip_step_on_spikes": True,
        "skip_step_interval": 6,
        "skip_step_scaling_factor": 3.0,
    }
    return base_values().model_copy(
        update={"learning_rate": RATE, **constant, **skipping, **settings}
    )


def start():
    return {"w": jnp.ones((2, 3)), "frozen": jnp.ones(4)}


def gradients(step):
    rng = np.random.default_rng(100 + step)
    return {"w": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32), "frozen": jnp.zeros(4)}


def run(config, losses, norms):
    """(skipped or not, parameters after) of each step, jitted, with donated state."""
    optimizer = build_optimizer(config, AXES)

    def step(parameters, state, grads, loss, norm):
        updates, state = optimizer.update(grads, state, parameters, loss=loss, raw_grad_norm=norm)
        return optax.apply_updates(parameters, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    parameters, skipped, trail = start(), [], []
    state = jax.jit(optimizer.init)(parameters)
    assert not bool(state.skipped)
    for count, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        parameters, state = step(
            parameters, state, gradients(count), jnp.float32(loss), jnp.float32(norm)
        )
        skipped.append(bool(state.skipped))
        trail.append(np.asarray(parameters["w"]))
    return skipped, trail, state


def simulate(losses, norms, interval, factor):
    """The steps that are skipped: the specification, with lists."""
    windows, skipped = ([], []), []
    for pair in zip(losses, norms, strict=True):
        if not np.all(np.isfinite(pair)):
            skipped.append(True)
            continue
        enough = len(windows[0]) >= interval / 2 and len(windows[0]) >= 2
        skipped.append(
            enough
            and any(
                value > np.mean(window) + factor * np.std(window, ddof=1)
                for value, window in zip(pair, windows, strict=True)
            )
        )
        for value, window in zip(pair, windows, strict=True):
            window.append(value)
            if len(window) > interval:
                window.pop(0)
    return skipped


@pytest.mark.parametrize(
    ("interval", "factor", "seed"),
    [(6, 1.0, 0), (7, 1.5, 1), (16, 2.0, 2), (2, 1.0, 3), (3, 4.0, 4)],
)
def test_skips_the_same_steps_as_a_simulation(interval, factor, seed):
    rng = np.random.default_rng(seed)
    losses, norms = 3 + 0.1 * rng.normal(size=80), 1 + 0.05 * rng.normal(size=80)
    losses[rng.integers(0, 80, 6)] += 5
    norms[rng.integers(0, 80, 6)] *= 20
    norms[40:] += 2  # a lasting change of level
    losses[25], norms[26], norms[0], losses[60] = np.nan, np.inf, np.nan, -np.inf
    losses, norms = losses.astype(np.float32), norms.astype(np.float32)
    expected = simulate(losses.astype(np.float64), norms.astype(np.float64), interval, factor)
    config = config_with(
        opt_type="sgd", skip_step_interval=interval, skip_step_scaling_factor=factor
    )
    skipped, _, _ = run(config, losses, norms)
    assert skipped == expected
    assert 6 < sum(expected) < 60, "the case must have both outcomes"


@pytest.mark.parametrize("which", ["loss", "norm"])
def test_spike_of_loss_or_norm_changes_nothing(which):
    calm = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1]
    jump = [*calm[:5], 9.0, *calm[6:]]
    losses, norms = (jump, calm) if which == "loss" else (calm, jump)
    skipped, trail, state = run(config_with(), losses, norms)
    assert skipped == [count == 5 for count in range(8)]
    np.testing.assert_array_equal(trail[5], trail[4])

    # The inner optimizer has seen the other seven gradients only.
    plain = build_optimizer(
        config_with(
            skip_step_on_spikes=False, skip_step_interval=128, skip_step_scaling_factor=6.0
        ),
        AXES,
    )
    parameters = start()
    inner = plain.init(parameters)
    update = jax.jit(plain.update)
    for count in (0, 1, 2, 3, 4, 6, 7):
        updates, inner = update(gradients(count), inner, parameters)
        parameters = optax.apply_updates(parameters, updates)
    np.testing.assert_allclose(trail[-1], parameters["w"], rtol=1e-6)
    actual, expected = jax.tree.leaves(state.inner_state), jax.tree.leaves(inner)
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


def test_skips_nothing_before_half_a_window():
    skipped, _, _ = run(
        config_with(opt_type="sgd", skip_step_interval=8), [1.0, 1.1, 50.0, 1.0, 1e6], [1.0] * 5
    )
    assert skipped == [False, False, False, False, True]


def test_nonfinite_gradients_do_not_change_weights_or_state():
    optimizer = build_optimizer(config_with(), AXES)
    parameters, state = start(), optimizer.init(start())
    poison = jax.tree.map(lambda value: jnp.full_like(value, jnp.nan), parameters)
    updates, state = jax.jit(optimizer.update)(
        poison, state, parameters, loss=jnp.nan, raw_grad_norm=jnp.nan
    )
    assert bool(state.skipped)
    for leaf in jax.tree.leaves((updates, state)):
        np.testing.assert_array_equal(
            leaf, np.ones_like(leaf) if leaf.dtype == bool else np.zeros_like(leaf)
        )


def test_requires_loss_and_norm_and_two_steps():
    optimizer = build_optimizer(config_with(), AXES)
    with pytest.raises(TypeError, match="loss"):
        optimizer.update(gradients(0), optimizer.init(start()), start())
    with pytest.raises(ConfigError, match="skip_step_interval=1 is too short"):
        build_optimizer(config_with(skip_step_interval=1), AXES)


def test_wraps_muon_and_frozen_parameters():
    config = config_with(opt_type="muon", trainable_parameters_mask=["w"])
    skipped, trail, state = run(config, [1.0, 1.1, 0.9, 1.0, 70.0], [1.0] * 5)
    assert skipped == [False] * 4 + [True]
    np.testing.assert_array_equal(trail[4], trail[3])
    assert not any(leaf.shape == (4,) for leaf in jax.tree.leaves(state))
