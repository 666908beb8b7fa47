"""Layers in fp8 as on one GPU, their kernels interpreted, against the general way through the same
layers.
"""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from maxtext.configs.derive import Devices
from maxtext.layers import eight_bits, linear
from maxtext.models import transformer
from maxtext.models.configuration import load
from maxtext.trainers.losses import language_model_losses
from maxtext.trainers.run_context import RunContext

pytestmark = pytest.mark.usefixtures("quick_programs")

WORDS = ["base_emb_dim=128", "base_num_decoder_layers=1", "base_num_query_heads=4", "base_num_kv_heads=4",
         "head_dim=32", "base_mlp_dim=384", "vocab_size=384", "max_target_length=64", "per_device_batch_size=2",
         "quantization=fp8_full", "z_loss_multiplier=0.1", "attention=dot_product", "remat_policy=none",
         "dataset_type=synthetic"]  # fmt: skip
NORMS = {"rms_norm_rows", "rms_norm_rows_backward"}
MATMULS = {"fp8_quantize_rowwise", "fp8_quantize_and_transpose", "fp8_transpose"}
GATED = {"fp8_quantize_gated_rows", "fp8_gated_backward_rows", "add_rms_norm_rows"}
LOSSES = {"cross_entropy_log_sums", "cross_entropy_backward"}
ALL = NORMS | MATMULS | GATED | LOSSES
AFTER = ["use_post_attn_norm=true", "use_post_ffw_norm=true", "sliding_window_size=16"]
FAMILIES = {
    "llama": (["decoder_block=llama2"], ALL),
    "scanned": (["base_num_decoder_layers=2", "scan_layers=true"], ALL),
    "computed again": (["remat_policy=full"], ALL),
    "queries normed": (["decoder_block=qwen3", "use_qk_norm=true"], ALL),
    "normed after, gelu": (["decoder_block=gemma2", *AFTER], ALL - {"add_rms_norm_rows"}),
    "gelu_exact": (["mlp_activations=[gelu_exact, linear]"], ALL - GATED),
    "one branch, biases": (["decoder_block=gpt3"], MATMULS | LOSSES),
    "joined kernels": (["fused_qkv=true", "fused_mlp=true"], MATMULS | LOSSES),
    "experts": (
        ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2"],
        ALL - GATED,
    ),
    "in float32": (["dtype=float32"], MATMULS | LOSSES),
    "a head in bfloat16": (["quantization=fp8"], ALL),
    "logits that are capped": (["final_logits_soft_cap=5.0"], ALL - LOSSES),
    "fewer heads than the stream": (
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
    "grouped heads": (["base_num_kv_heads=2", "head_dim=64"], ALL),
    "widths without tiles": (["base_emb_dim=96"], LOSSES),
}


@contextmanager
def as_on_a_gpu():
    """Triton kernels are interpreted; yields the names of those that ran."""
    names = set()

    def interpreted(*arguments, run=pl.pallas_call, **options):
        names.add(options["name"])
        return run(*arguments, **options | {"interpret": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", interpreted)
        for module in (eight_bits, linear, transformer):
            patch.setattr(module, "only_platform", lambda: "gpu")
        yield names


def gradients(words):
    """The loss, and the gradient of each weight."""
    given = dict(word.split("=") for word in [*WORDS, *words])
    words = [f"{key}={value}" for key, value in given.items()]
    context = RunContext.from_config(
        load(None, words, environ={}, devices=Devices(1)), jax.devices()[:1]
    )
    ids = np.random.default_rng(0).integers(0, 384, (2, 65))
    positions = np.tile(np.arange(64), (2, 1))
    documents = (positions < 50).astype(np.int32)  # what follows them does not count
    fields = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for name in ("inputs", "targets"):
        fields |= {f"{name}_position": positions, f"{name}_segmentation": documents}
    batch = {name: jnp.asarray(field, jnp.int32) for name, field in fields.items()}

    def loss(weights):
        return (
            sum(
                language_model_losses(
                    context.config, context.template, weights, batch, None
                ).sums.values()
            )
            / 100
        )

    return jax.jit(jax.value_and_grad(loss))(jax.jit(context.random_state)().weights)


QUICK = ("llama", "joined kernels", "widths without tiles")
EXHAUSTIVE = (
    "queries normed",
    "grouped heads",
    "in float32",
    "gelu_exact",
    "scanned",
)  # parts of other cases


def marked(name):
    if name in EXHAUSTIVE:
        return pytest.mark.exhaustive
    return () if name in QUICK else pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "kernels"),
    [pytest.param(*each, id=name, marks=marked(name)) for name, each in FAMILIES.items()],
)
def test_families(words, kernels):
    with as_on_a_gpu() as names:
        loss, found = gradients(words)
    assert names == kernels
    right, expected = gradients(words)
    np.testing.assert_allclose(loss, right, rtol=5e-3)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(each, np.float32).ravel() for each in (ours, theirs))
        if np.any(theirs):
            assert ours @ theirs > 0.95 * np.linalg.norm(ours) * np.linalg.norm(theirs)
            np.testing.assert_allclose(np.linalg.norm(ours), np.linalg.norm(theirs), rtol=0.1)
