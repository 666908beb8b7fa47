"""Ten steps of AdamW, Adam as in Pax, and SGD, with decay masks, schedules and frozen parameters.

The other side is torch.optim in float64, or the formula in numpy; the rate of each step is the
schedule's formula.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from maxtext.common.errors import ConfigError
from maxtext.configs.load import base_values
from maxtext.optimizers import build_optimizer, parameter_paths

STEPS, PEAK = 10, 0.05
AXES = {
    "embedding": ("vocab", "embed_vocab"),
    "layers": [
        {
            "attention": {
                "query": {"weight": ("embed", "q_heads", "kv"), "bias": ("q_heads", "kv")}
            },
            "norm": ("norm",),
        },
        {"mlp": {"wi": {"weight": ("embed", "mlp")}}},
    ],
}
SHAPES = {
    "embedding": (6, 4),
    "layers/0/attention/query/bias": (2, 3),
    "layers/0/attention/query/weight": (4, 2, 3),
    "layers/0/norm": (4,),
    "layers/1/mlp/wi/weight": (4, 5),
}


def config_with(**settings):
    return base_values().model_copy(update={"learning_rate": PEAK, "steps": 12, **settings})


def rate(step):
    """The default schedule over 12 steps: one of warm-up, then cosine to a tenth."""
    return (
        0.0 if step == 0 else PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 11)))
    )


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def as_tree(flat, dtype=jnp.float32):
    paths = parameter_paths(AXES, is_leaf=lambda node: isinstance(node, tuple))
    return jax.tree.map(lambda path: jnp.asarray(flat[path], dtype), paths)


def as_flat(tree):
    return dict(
        zip(
            jax.tree.leaves(parameter_paths(tree)),
            map(np.asarray, jax.tree.leaves(tree)),
            strict=True,
        )
    )


def train(config):
    """Ten jitted steps with donated state and the arguments of spike skipping."""
    optimizer = build_optimizer(config, AXES)

    def step(parameters, state, gradients):
        updates, state = optimizer.update(
            gradients, state, parameters, loss=jnp.float32(1.0), raw_grad_norm=jnp.float32(1.0)
        )
        return optax.apply_updates(parameters, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    parameters = as_tree(arrays(0))
    state = jax.jit(optimizer.init)(parameters)
    for count in range(STEPS):
        parameters, state = step(parameters, state, as_tree(arrays(count + 1)))
    assert step._cache_size() == 1, "types or structure of the state changed between steps"
    return as_flat(parameters), state


def train_in_torch(make, groups):
    """`groups`: pairs of (parameter names, options of torch's optimizer)."""
    parameters = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in arrays(0).items()
    }
    optimizer = make(
        [{"params": [parameters[name] for name in names], **options} for names, options in groups]
    )
    for count in range(STEPS):
        for name, gradient in arrays(count + 1).items():
            parameters[name].grad = torch.tensor(gradient, dtype=torch.float64)
        for group in optimizer.param_groups:
            group["lr"] = rate(count)
        optimizer.step()
    return {name: value.numpy() for name, value in parameters.items()}


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, err_msg=name, **(tolerance or {"rtol": 2e-5, "atol": 2e-6})
        )


NOT_DECAYED = ["embedding", "layers/0/attention/query/bias", "layers/0/norm"]
DECAYED = [name for name in SHAPES if name not in NOT_DECAYED]


@pytest.mark.parametrize("opt_type", ["adamw", "adam_pax"])
def test_adam_with_decay_mask_equals_torch_adamw(opt_type):
    # Pax keeps unbiased moments where Adam corrects biased ones: the same updates, from another
    # state.
    actual, _ = train(
        config_with(
            opt_type=opt_type,
            adam_b1=0.8,
            adam_b2=0.9,
            adam_eps=1e-3,
            adam_weight_decay=0.3,
            adamw_mask=["norm", "bias$", "^embedding"],
        )
    )
    options = {"betas": (0.8, 0.9), "eps": 1e-3}
    expected = train_in_torch(
        lambda groups: torch.optim.AdamW(groups, lr=1.0),
        [
            (DECAYED, {**options, "weight_decay": 0.3}),
            (NOT_DECAYED, {**options, "weight_decay": 0.0}),
        ],
    )
    assert_same(actual, expected)


def test_sgd_equals_torch_sgd():
    actual, state = train(config_with(opt_type="sgd"))
    assert_same(
        actual, train_in_torch(lambda groups: torch.optim.SGD(groups, lr=1.0), [(list(SHAPES), {})])
    )
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [()], (
        "SGD keeps nothing but its count"
    )


def test_eps_root_is_inside_the_square_root_of_adamw():
    settings = {
        "adam_b1": 0.8,
        "adam_b2": 0.9,
        "adam_eps": 1e-3,
        "adam_eps_root": 0.5,
        "adam_weight_decay": 0.0,
    }
    actual, _ = train(config_with(opt_type="adamw", **settings))
    parameters = {name: value.astype(np.float64) for name, value in arrays(0).items()}
    for name, value in parameters.items():
        mu, nu = np.zeros_like(value), np.zeros_like(value)
        for t in range(1, STEPS + 1):
            gradient = arrays(t)[name].astype(np.float64)
            mu, nu = 0.8 * mu + 0.2 * gradient, 0.9 * nu + 0.1 * gradient**2
            value -= rate(t - 1) * (mu / (1 - 0.8**t)) / (np.sqrt(nu / (1 - 0.9**t) + 0.5) + 1e-3)
    assert_same(actual, parameters)


def test_adam_pax_equals_its_formula():
    b1, b2, eps, eps_root, decay = 0.85, 0.97, 1e-2, 0.3, 0.2
    config = config_with(
        opt_type="adam_pax",
        adam_b1=b1,
        adam_b2=b2,
        adam_eps=eps,
        adam_eps_root=eps_root,
        adam_weight_decay=decay,
    )
    actual, state = train(config)
    parameters = {name: value.astype(np.float64) for name, value in arrays(0).items()}
    moments = {}
    for name, value in parameters.items():
        mu, nu = np.zeros_like(value), np.zeros_like(value)
        for t in range(1, STEPS + 1):
            gradient = arrays(t)[name].astype(np.float64)
            decay1, decay2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
            mu = decay1 * mu + (1 - decay1) * gradient
            nu = decay2 * nu + (1 - decay2) * gradient**2
            value -= rate(t - 1) * (mu / (np.sqrt(nu + eps_root) + eps) + decay * value)
        moments[name] = mu, nu
    assert_same(actual, parameters)
    adam = state.inner_states["main"].inner_state[0]
    assert_same(as_flat(adam.mu), {name: mu for name, (mu, _) in moments.items()})
    assert_same(as_flat(adam.nu), {name: nu for name, (_, nu) in moments.items()})


@pytest.mark.parametrize("opt_type", ["adamw", "adam_pax", "sgd", "muon"])
def test_frozen_parameters_have_no_update_and_no_state(opt_type):
    actual, state = train(
        config_with(opt_type=opt_type, trainable_parameters_mask=["query/weight", "norm"])
    )
    start = arrays(0)
    for name, value in actual.items():
        moved = name in ("layers/0/attention/query/weight", "layers/0/norm")
        assert (np.abs(value - start[name]).max() > 1e-3) == moved, name
    # Muon has one moment of the weight (24 entries) and two of the norm (4); Adam two of both.
    expected = {"adamw": 2 * 24 + 2 * 4, "adam_pax": 2 * 24 + 2 * 4, "sgd": 0, "muon": 24 + 2 * 4}[
        opt_type
    ]
    entries = sum(
        leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 3
    )  # not counts and coefficients
    assert entries == expected
    frozen = {(6, 4), (2, 3), (4, 5)}
    assert not frozen & {leaf.shape for leaf in jax.tree.leaves(state)}


@pytest.mark.parametrize("opt_type", ["adamw", "adam_pax", "muon"])
@pytest.mark.parametrize(("mu_dtype", "expected"), [("", jnp.bfloat16), ("float32", jnp.float32)])
def test_state_dtypes_do_not_change_with_float32_gradients(opt_type, mu_dtype, expected):
    optimizer = build_optimizer(config_with(opt_type=opt_type, mu_dtype=mu_dtype), AXES)
    parameters, gradients = as_tree(arrays(0), dtype=jnp.bfloat16), as_tree(arrays(1))
    state = jax.eval_shape(optimizer.init, parameters)
    updates, new_state = jax.eval_shape(optimizer.update, gradients, state, parameters)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert [leaf.dtype for leaf in jax.tree.leaves(new_state)] == [
        leaf.dtype for leaf in jax.tree.leaves(state)
    ]
    first = optax.tree.get_all_with_path(state, "mu")
    assert len(first) == (2 if opt_type == "muon" else 1)
    assert {leaf.dtype for _, mu in first for leaf in jax.tree.leaves(mu)} == {jnp.dtype(expected)}
    second = optax.tree.get_all_with_path(state, "nu")
    assert {leaf.dtype for _, nu in second for leaf in jax.tree.leaves(nu)} == {
        jnp.dtype(jnp.float32)
    }


def test_bfloat16_first_moment_is_rounded_at_each_step():
    _, state = train(config_with(mu_dtype="bfloat16"))
    mu = as_flat(state.inner_states["main"].inner_state[0].mu)["layers/0/norm"]
    expected = np.zeros(4, np.float32)
    for t in range(1, STEPS + 1):
        average = 0.9 * expected.astype(np.float64) + 0.1 * arrays(t)["layers/0/norm"]
        expected = torch.tensor(average).to(torch.bfloat16).float().numpy()
    assert mu.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        mu.astype(np.float32), expected, rtol=2**-7
    )  # one rounding may fall the other way


def test_parameter_paths():
    tree = {"layers": [{"norm": 1.0}, [2.0, 3.0]], "head": {"weight": 4.0}}
    expected = {
        "layers": [{"norm": "layers/0/norm"}, ["layers/1/0", "layers/1/1"]],
        "head": {"weight": "head/weight"},
    }
    assert parameter_paths(tree) == expected


def test_state_shardings_follow_from_parameter_shardings():
    # What a trainer does to place the state: moments like their parameter, all else replicated.
    optimizer = build_optimizer(
        config_with(opt_type="muon", trainable_parameters_mask=["layers"]), AXES
    )
    parameters = as_tree(arrays(0))
    state = jax.eval_shape(optimizer.init, parameters)
    placed = optax.tree_map_params(
        optimizer,
        lambda leaf, name: leaf if isinstance(leaf, optax.MaskedNode) else name,
        state,
        parameter_paths(parameters),
        transform_non_params=lambda _: "replicated",
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    assert set(jax.tree.leaves(placed)) == {
        "replicated",
        *(name for name in SHAPES if name != "embedding"),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"wsd_decay_style": "cosine"},
            "wsd_decay_style=cosine has no effect with lr_schedule_type=cosine",
        ),
        (
            {"skip_step_interval": 64},
            "skip_step_interval=64 has no effect with skip_step_on_spikes=false",
        ),
        ({"adam_b2": 1.0}, "adam_b2=1.0 would never forget"),
        ({"adamw_mask": ["nrom"]}, r"adamw_mask=\['nrom'\] matches no parameter"),
        (
            {"trainable_parameters_mask": ["lora"]},
            "trainable_parameters_mask=.* matches no parameter",
        ),
        (
            {"opt_type": "muon", "trainable_parameters_mask": ["norm"]},
            "opt_type=muon has no trainable matrix",
        ),
    ],
)
def test_rejects_inconsistent_keys(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(config_with(**settings), AXES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opt_type": "sgd", "mu_dtype": "bfloat16"}, "mu_dtype=bfloat16 has no effect"),
        ({"opt_type": "sgd", "adam_b2": 0.99}, "adam_b2=0.99 has no effect with opt_type=sgd"),
        ({"opt_type": "sgd", "adamw_mask": ["norm"]}, "adamw_mask=['norm'] has no effect"),
        ({"muon_consistent_rms": 0.2}, "muon_consistent_rms=0.2 has no effect with opt_type=adamw"),
    ],
)
def test_warns_of_keys_of_other_optimizers(settings, message, caplog):
    build_optimizer(config_with(**settings), AXES)
    assert message in caplog.text
