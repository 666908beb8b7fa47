"""fp8 blocks as on one GPU, with interpreted kernels, against the plain blocks in fp8."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.transformer import (
    build_context,
    implementations,
    initial_weights,
    make_template,
)
from maxtext.trainers.model_losses import language_model_losses
from tests.layers.gpu_context import interpreted_kernels

OVERRIDES = ["base_emb_dim=128", "base_num_decoder_layers=1", "base_num_query_heads=4",
             "base_num_kv_heads=4",
         "head_dim=32", "base_mlp_dim=384", "vocab_size=384", "max_target_length=64",
         "per_device_batch_size=2", "quantization=fp8_full", "z_loss_multiplier=0.1",
         "attention=dot_product", "remat_policy=none",
         "dataset_type=synthetic"]  # fmt: skip
NORMS = {"rms_norm_rows", "rms_norm_rows_backward"}
MATMULS = {"fp8_quantize_rowwise", "fp8_quantize_and_transpose", "fp8_transpose"}
GATED = {"fp8_quantize_gated_rows", "fp8_gated_backward_rows", "add_rms_norm_rows"}
LOSSES = {"cross_entropy_log_sums", "cross_entropy_backward"}
ALL = NORMS | MATMULS | GATED | LOSSES
POST_NORMS = ["use_post_attn_norm=true", "use_post_ffw_norm=true", "sliding_window_size=16"]
FAMILIES = {
    "llama": (["decoder_block=llama2"], ALL),
    "scanned": (["base_num_decoder_layers=2", "scan_layers=true"], ALL),
    "rematerialized": (["remat_policy=full"], ALL),
    "QK norm": (["decoder_block=qwen3", "use_qk_norm=true"], ALL),
    "post-norms, gelu, bfloat16 head": (
        ["decoder_block=gemma2", *POST_NORMS, "quantization=fp8"],
        ALL - {"add_rms_norm_rows"},
    ),
    "gelu_exact": (["mlp_activations=[gelu_exact, linear]"], ALL - GATED),
    "one branch, biases": (["decoder_block=gpt3"], MATMULS | LOSSES),
    "one branch, soft-capped logits": (
        ["decoder_block=gpt3", "final_logits_soft_cap=5.0"],
        MATMULS,
    ),
    "fused weights": (["fused_qkv=true", "fused_mlp=true"], MATMULS | LOSSES),
    "experts": (
        # megablox=false: the grouped matmul for Hopper GPUs cannot be interpreted
        ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "megablox=false"],
        ALL - GATED,
    ),
    "float32": (["dtype=float32"], MATMULS | LOSSES),
    "bfloat16 head": (["quantization=fp8"], ALL),
    "soft-capped logits": (["final_logits_soft_cap=5.0"], ALL - LOSSES),
    "fewer heads than features": (
        [
            "base_num_query_heads=2",
            "base_num_kv_heads=2",
            "head_dim=64",
            "base_emb_dim=256",
            "scan_layers=true",
            "remat_policy=minimal",
        ],
        ALL,
    ),
    "GQA": (["base_num_kv_heads=2", "head_dim=64"], ALL),
    "dimensions without tiles": (["base_emb_dim=96"], LOSSES),
}


def value_and_grads(overrides, platform, capability=""):
    """The loss and the gradient of each weight, of the model built for this platform."""
    values = dict(override.split("=") for override in [*OVERRIDES, *overrides])
    args = [f"{key}={value}" for key, value in values.items()]
    config = load(None, args, environ={}, devices=Devices(1))
    context = replace(build_context(config), platform=platform, capability=capability)
    template = make_template(config, context)
    length = config.max_target_length
    ids = np.random.default_rng(0).integers(0, 384, (2, length + 1))
    positions = np.tile(np.arange(length), (2, 1))
    segments = (positions < 50).astype(np.int32)  # padding follows
    fields = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for name in ("inputs", "targets"):
        fields |= {f"{name}_position": positions, f"{name}_segmentation": segments}
    batch = {name: jnp.asarray(field, jnp.int32) for name, field in fields.items()}

    def loss(weights):
        losses = language_model_losses(config, template, weights, batch, None)
        return sum(losses.sums.values()) / 100

    return jax.jit(jax.value_and_grad(loss))(weights_of(config, template))


WEIGHTS: dict[str, Any] = {}


def weights_of(config, template):
    """Random weights, which depend on their shapes only: cases share them."""
    shapes = str(template.weights)
    if shapes not in WEIGHTS:
        WEIGHTS[shapes] = initial_weights(config)
    return WEIGHTS[shapes]


# The others have parts of these.
@pytest.mark.representative(
    "llama",
    "experts",
    "post-norms, gelu, bfloat16 head",
    "dimensions without tiles",
)
@pytest.mark.parametrize(
    ("overrides", "kernels"),
    [pytest.param(*case, id=name) for name, case in FAMILIES.items()],
)
@pytest.mark.slow
def test_equals_plain_blocks(overrides, kernels):
    with interpreted_kernels() as names:
        loss, grads = value_and_grads(overrides, "gpu", "9.0")
    assert names == kernels
    expected_loss, expected_grads = value_and_grads(overrides, "cpu")
    np.testing.assert_allclose(loss, expected_loss, rtol=5e-3)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True)
    for grad, expected in pairs:
        grad, expected = (np.asarray(x, np.float32).ravel() for x in (grad, expected))
        if np.any(expected):
            norms = np.linalg.norm(grad), np.linalg.norm(expected)
            assert grad @ expected > 0.95 * norms[0] * norms[1]
            np.testing.assert_allclose(*norms, rtol=0.1)


def chosen(overrides, **changes):
    config = load(None, [*OVERRIDES, *overrides], environ={}, devices=Devices(1))
    context = replace(build_context(config), platform="gpu", capability="9.0")
    return implementations(config, replace(context, **changes))


def test_choices_are_reported_with_reasons():
    assert chosen([]) == {"layers": "1 of 1 fp8 fused", "head loss": "1 of 1 fp8 fused"}
    assert "needs an NVIDIA GPU, not a CPU" in chosen([], platform="cpu")["layers"]
    assert "needs one GPU, not 8" in chosen([], num_devices=8)["layers"]
    assert "compute capability 8.9, not 8.0" in chosen([], capability="8.0")["layers"]
    experts = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2"]
    expected = "1 of 1 fp8 attention (not fp8 fused: fuses gated MLPs, not Moe)"
    assert chosen(experts)["layers"] == expected


@pytest.mark.slow
def test_tokens_are_padded_to_tiles():
    """2 x 60 tokens are not a multiple of 128."""
    overrides = ["max_target_length=60"]
    with interpreted_kernels() as names:
        loss, grads = value_and_grads(overrides, "gpu", "9.0")
    assert names >= NORMS | GATED
    expected_loss, expected_grads = value_and_grads(overrides, "cpu")
    np.testing.assert_allclose(loss, expected_loss, rtol=5e-3)
    for grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        norms = np.linalg.norm(grad), np.linalg.norm(expected)
        np.testing.assert_allclose(*norms, rtol=0.1)
