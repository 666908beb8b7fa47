"""Every remat policy computes what no remat computes, and keeps what the table in semantics.md
says.
"""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.configs.types.remat import SAVED_ON_DEVICE
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights, make_template
from maxtext.trainers.model_losses import language_model_losses

BATCH, LENGTH = 2, 32
WORDS = [
    "vocab_size=32", f"max_target_length={LENGTH}", "base_emb_dim=16", "base_num_query_heads=4",
    "base_num_kv_heads=2", "head_dim=4", "base_mlp_dim=24", "dtype=float32",
    "attention=dot_product",
    # With norms on the outputs, the outputs are needed by the backward pass, and a policy can keep
    # or lose them.
    "use_post_attn_norm=true", "use_post_ffw_norm=true",
]  # fmt: skip

PROJECTIONS = {"query_proj", "key_proj", "value_proj"}
MINIMAL = PROJECTIONS | {"out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"}
# policy: (kept on the device, moved to the host), of a layer with separate projections
KEPT = {
    "full": (set(), set()),
    "save_qkv_proj": (PROJECTIONS, set()),
    "save_out_proj": ({"out_proj"}, set()),
    "save_dot_except_mlp": (PROJECTIONS | {"out_proj"}, set()),
    "save_dot_with_context_except_mlp": (PROJECTIONS | {"out_proj", "context"}, set()),
    "save_dot_except_mlpwi": (PROJECTIONS | {"out_proj", "mlpwo"}, set()),
    "minimal": (MINIMAL, set()),
    "minimal_with_context": (MINIMAL | {"context"}, set()),
    "minimal_flash": (MINIMAL | {"context"}, set()),
    "qkv_proj_offloaded": (set(), PROJECTIONS),
    "minimal_offloaded": (set(), MINIMAL),
    # base.yml keeps decoder_layer_input under custom
    "custom": ({"decoder_layer_input", "query_proj", "attention_out"}, {"mlpwi_0", "mlpwo"}),
    "custom other": ({"mlpwi_1", "out_proj"}, {"decoder_layer_input", "context"}),
}
# of a layer with joint ones; what is not here is as above
KEPT_FUSED = {
    "save_qkv_proj": ({"qkv_proj"}, set()),
    "minimal_with_context": ({"qkv_proj", "out_proj", "mlpwi", "mlpwo", "context"}, set()),
    "qkv_proj_offloaded": (set(), set()),
    "minimal_offloaded": (set(), {"qkv_proj", "out_proj", "mlpwi", "mlpwo"}),
    "custom": ({"decoder_layer_input", "qkv_proj"}, {"mlpwi"}),
}


def words(policy, kept):
    if not policy.startswith("custom"):
        return [f"remat_policy={policy}"]
    device, host = kept
    return [
        "remat_policy=custom",
        *(f"{name}=device" for name in device),
        *(f"{name}=offload" for name in host),
    ]


def configuration(*extra):
    return load(None, [*WORDS, *extra], environ={}, devices=Devices(1))


def loss_of(config):
    ids = np.random.default_rng(0).integers(0, 32, (BATCH, LENGTH + 1))
    positions = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "inputs_position": positions}
    batch |= {
        "inputs_segmentation": np.ones_like(positions),
        "targets_segmentation": np.ones_like(positions),
    }
    batch = jax.tree.map(lambda field: jnp.asarray(field, jnp.int32), batch)
    template = make_template(config)
    return lambda weights: (
        language_model_losses(config, template, weights, batch, None).sums["lm_loss"]
        / ids[:, 1:].size
    )


class Runs:
    """Compiled gradients of a six-layer model, one for each set of words, all from the same
    weights.
    """

    def __init__(self):
        plain = configuration("base_num_decoder_layers=6")
        self.weights = jax.jit(lambda: initial_weights(plain))()
        self.done = {}

    def __call__(self, *extra):
        if extra not in self.done:
            loss = loss_of(configuration("base_num_decoder_layers=6", *extra))
            compiled = jax.jit(jax.value_and_grad(loss)).lower(self.weights).compile()
            self.done[extra] = (
                *compiled(self.weights),
                compiled.memory_analysis().temp_size_in_bytes,
            )
        return self.done[extra]


@pytest.fixture(scope="module")
def runs():
    return Runs()


def test_every_policy_is_here():
    assert set(SAVED_ON_DEVICE) | {"custom"} == {policy.split()[0] for policy in KEPT}


@pytest.mark.parametrize("policy", KEPT)
def test_same_loss_and_gradients_as_without(runs, policy):
    expected, gradients, _ = runs("remat_policy=none")
    native, our_gradients, _ = runs(*words(policy, KEPT[policy]))
    np.testing.assert_allclose(native, expected, rtol=1e-6)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * scale),
        our_gradients,
        gradients,
    )


def test_remat_saves_memory(runs):
    """Without remat each of the six layers keeps its attention weights of [B, H, S, S] floats, and
    more.
    """
    without, minimal, full = (
        runs(f"remat_policy={policy}")[2] for policy in ("none", "minimal", "full")
    )
    assert full < minimal < without
    attention = 4 * BATCH * 4 * LENGTH * LENGTH
    assert without - minimal > 4 * attention
    # What minimal keeps beyond full: q (16), k, v (8), out (16), gate, up (24), down (16) a token
    # and layer. The two programs need not be largest at the same moment, hence half of it.
    assert minimal - full > 4 * 6 * BATCH * LENGTH * (16 + 8 + 8 + 16 + 24 + 24 + 16) / 2


def residuals(config):
    """(names kept on the device, number of tensors kept on the host, number kept that were not
    named) of one layer.
    """
    loss = loss_of(config)
    weights = jax.eval_shape(lambda: initial_weights(config))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        jax.ad_checkpoint.print_saved_residuals(loss, weights)
    lines = text.getvalue().splitlines()
    names = {found for line in lines for found in re.findall(r"named '(\w+)'", line)}
    inside = r"layers/(attention|mlp|rope)\.py|kernels/attention"
    unnamed = [
        line
        for line in lines
        if re.search(inside, line) and "named" not in line and "<host>" not in line
    ]
    return names, sum("<host>" in line for line in lines), len(unnamed)


@pytest.mark.parametrize("policy", KEPT)
def test_keeps_what_the_table_says(policy):
    config = configuration(
        "base_num_decoder_layers=1", "scan_layers=false", *words(policy, KEPT[policy])
    )
    device, host = KEPT[policy]
    assert residuals(config) == (device, len(host), 0)


@pytest.mark.parametrize("policy", KEPT_FUSED)
def test_keeps_what_the_table_says_of_joint_projections(policy):
    joint = ("base_num_decoder_layers=1", "scan_layers=false", "fused_qkv=true", "fused_mlp=true")
    device, host = KEPT_FUSED[policy]
    assert residuals(configuration(*joint, *words(policy, KEPT_FUSED[policy]))) == (
        device,
        len(host),
        0,
    )


def test_without_remat_everything_is_kept():
    config = configuration("base_num_decoder_layers=1", "scan_layers=false", "remat_policy=none")
    names, host, unnamed = residuals(config)
    assert "value_proj" in names
    assert host == 0
    assert unnamed > 10


def test_an_empty_policy_is_none():
    assert configuration("remat_policy=").tensors_on_device is None
