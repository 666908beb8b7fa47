"""Muon against Newton-Schulz in numpy with the published coefficients, and its first step against
torch.optim.Muon.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from maxtext.common.errors import ConfigError
from maxtext.configs.load import base_values
from maxtext.optimizers import build_optimizer
from maxtext.optimizers.muon import dimension_numbers

RATE, STEPS, BETA = 0.02, 10, 0.9

# name: (axes, shape, how to see it as [copies, input, output] and back)
MATRICES = {
    "query": (
        ("embed", "q_heads", "kv"),
        (8, 2, 3),
        lambda x: x.reshape(1, 8, 6),
        lambda x: x.reshape(8, 2, 3),
    ),
    "fused": (
        ("embed", "kv_heads", "qkv", "kv_head_dim"),
        (5, 2, 3, 2),
        lambda x: x.reshape(1, 5, 12),
        lambda x: x.reshape(5, 2, 3, 2),
    ),
    "out": (
        ("heads", "kv", "embed"),
        (2, 3, 8),
        lambda x: x.reshape(1, 6, 8),
        lambda x: x.reshape(2, 3, 8),
    ),
    "wi": (("embed", "mlp"), (4, 9), lambda x: x[None], lambda x: x[0]),
    "wo": (("mlp", "embed"), (9, 4), lambda x: x[None], lambda x: x[0]),
    "experts": (("exp", "embed_moe", "mlp_moe"), (3, 4, 6), lambda x: x, lambda x: x),
    "stacked": (
        ("embed", "layers", "q_heads", "kv"),
        (4, 3, 2, 2),
        lambda x: x.swapaxes(0, 1).reshape(3, 4, 4),
        lambda x: x.reshape(3, 4, 2, 2).swapaxes(0, 1),
    ),
    "stacked_experts": (
        ("exp", "moe_layers", "mlp_moe", "embed_moe"),
        (2, 3, 5, 4),
        lambda x: x.reshape(6, 5, 4),
        lambda x: x.reshape(2, 3, 5, 4),
    ),
    "gate_and_up": (
        ("embed", None, "mlp"),
        (4, 2, 5),
        lambda x: x.swapaxes(0, 1),
        lambda x: x.swapaxes(0, 1),
    ),
}
OTHERS = {
    "embedding": (("vocab", "embed_vocab"), (7, 4)),
    "head": (("embed_vocab", "vocab"), (4, 7)),
    "norm": (("norm",), (4,)),
    "stacked_norm": (("norm", "layers"), (4, 3)),
    "bias": (("q_heads", "kv"), (2, 3)),
    "expert_bias": (("exp", "mlp_moe"), (3, 6)),
    "sinks": (("layers", "q_heads"), (3, 2)),
    "router": (("embed", "exp"), (4, 3)),
    "positions": ((None, "embed"), (5, 4)),
}
AXES = {name: entry[0] for name, entry in {**MATRICES, **OTHERS}.items()}
SHAPES = {name: entry[1] for name, entry in {**MATRICES, **OTHERS}.items()}


def config_with(**settings):
    """A constant rate, so that the tests speak of the rule alone."""
    constant = {
        "lr_schedule_type": "wsd",
        "wsd_decay_steps_fraction": 0.0,
        "warmup_steps_fraction": 0.0,
    }
    return base_values().model_copy(
        update={"opt_type": "muon", "learning_rate": RATE, **constant, **settings}
    )


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(config, axes):
    optimizer = build_optimizer(config, axes)
    parameters = {name: jnp.asarray(value) for name, value in arrays(0).items() if name in axes}
    state = jax.jit(optimizer.init)(parameters)

    @jax.jit
    def step(parameters, state, gradients):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for count in range(STEPS):
        gradients = {
            name: jnp.asarray(value) for name, value in arrays(count + 1).items() if name in axes
        }
        parameters, state = step(parameters, state, gradients)
    return parameters, state


def newton_schulz(matrix):
    """Jordan et al. 2024: five steps of the quintic, from the matrix divided by its Frobenius
    norm.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_in_numpy(name, decay, consistent_rms):
    _, _, as_matrices, back = MATRICES[name]
    value = as_matrices(arrays(0)[name].astype(np.float64))
    momentum = np.zeros_like(value)
    num_matrices, fan_in, fan_out = value.shape
    if consistent_rms is None:
        scale = np.sqrt(max(1, fan_out / fan_in))
    else:
        scale = consistent_rms * np.sqrt(max(fan_in, fan_out))
    for t in range(1, STEPS + 1):
        gradient = as_matrices(arrays(t)[name].astype(np.float64))
        momentum = BETA * momentum + (1 - BETA) * gradient
        nesterov = BETA * momentum / (1 - BETA ** (t + 1)) + (1 - BETA) * gradient / (1 - BETA**t)
        update = np.stack([newton_schulz(nesterov[index]) for index in range(num_matrices)])
        value = value - RATE * (scale * update + decay * value)
    return back(value)


# Compilation takes most of the time, so the second scale is tested on a few shapes only.
@pytest.mark.parametrize(
    ("consistent_rms", "names"),
    [(None, tuple(AXES.keys() - {"wi", "wo", "experts"})), (0.2, ("out", "wo", "experts", "bias"))],
)
def test_matrices_use_newton_schulz_and_others_torch_adamw(consistent_rms, names):
    config = config_with(
        muon_beta=BETA,
        muon_weight_decay=0.5,
        muon_consistent_rms=consistent_rms,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps=1e-3,
        adam_weight_decay=0.25,
        adamw_mask=["^wo$", "norm", "bias"],
    )
    actual, _ = train(config, {name: AXES[name] for name in names})
    for name in MATRICES.keys() & names:
        expected = muon_in_numpy(name, 0.0 if name == "wo" else 0.5, consistent_rms)
        np.testing.assert_allclose(actual[name], expected, rtol=2e-4, atol=2e-4, err_msg=name)
    for name in OTHERS.keys() & names:
        decay = 0.0 if "norm" in name or "bias" in name else 0.25
        parameter = torch.tensor(arrays(0)[name], dtype=torch.float64)
        reference = torch.optim.AdamW(
            [parameter], lr=RATE, betas=(0.8, 0.9), eps=1e-3, weight_decay=decay
        )
        for t in range(1, STEPS + 1):
            parameter.grad = torch.tensor(arrays(t)[name], dtype=torch.float64)
            reference.step()
        np.testing.assert_allclose(
            actual[name], parameter.numpy(), rtol=2e-5, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize(
    ("name", "consistent_rms", "adjustment"),
    [("wi", None, "original"), ("wo", None, "original"), ("wo", 0.2, "match_rms_adamw")],
)
def test_first_step_equals_torch_muon(name, consistent_rms, adjustment):
    # The momentum differs after the first step. torch iterates in bfloat16 and stores [out, in].
    axes = {name: AXES[name]}
    optimizer = build_optimizer(
        config_with(muon_consistent_rms=consistent_rms, muon_weight_decay=0.5), axes
    )
    start, gradient = arrays(0)[name], arrays(1)[name]
    parameters = {name: jnp.asarray(start)}
    update = jax.jit(
        lambda gradients: optimizer.update(gradients, optimizer.init(parameters), parameters)[0]
    )
    updates = update({name: jnp.asarray(gradient)})

    parameter = torch.nn.Parameter(torch.tensor(start.T.copy()))
    parameter.grad = torch.tensor(gradient.T.copy())
    torch.optim.Muon([parameter], lr=RATE, weight_decay=0.5, adjust_lr_fn=adjustment).step()
    expected = parameter.detach().numpy().T - start
    assert np.linalg.norm(updates[name] - expected) < 0.02 * np.linalg.norm(expected)


def test_dimension_numbers_of_mla_and_unusual_axis_orders():
    assert dimension_numbers("wq_b", ("q_lora", "layers", "q_heads", "kv")) == ((0,), (2, 3))
    assert dimension_numbers("wkv_a", ("layers", "embed", "kv_lora")) == ((1,), (2,))
    assert dimension_numbers("out", ("heads", "layers", "kv", "embed")) == ((0, 2), (3,))
    assert dimension_numbers("decay", ("gdn_head",)) is None
    assert dimension_numbers("scalar", ()) is None
    with pytest.raises(ConfigError, match="cannot tell the input from the output axes of strange"):
        dimension_numbers("strange", ("embed", "mlp", "q_heads"))
