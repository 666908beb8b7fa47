"""Training with int8 and fp8 matmuls: which matmuls are quantized, and that training converges like
bfloat16."""

from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import maxtext
from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.inference.llm import LLM
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.compilation.compile import compile_train_step, lower_train_step
from maxtext.trainers.data_loader import to_devices

LAYERS, ROWS, LENGTH, STEPS = 1, 8, 32, 100
OVERRIDES = ["base_emb_dim=32", f"base_num_decoder_layers={LAYERS}", "base_num_query_heads=2",
             "base_num_kv_heads=1", "head_dim=16",
         "base_mlp_dim=64", "vocab_size=256", f"max_target_length={LENGTH}",
         f"per_device_batch_size={ROWS}", "remat_policy=none", "dataset_type=synthetic",
         f"steps={STEPS}", "learning_rate=3e-3",
         "attention=dot_product"]  # fmt: skip
LAST = 20  # steps whose loss counts
EXPERTS = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=64"]


def context_of(*overrides):
    return build_run_context(
        load(None, [*OVERRIDES, *overrides], environ={}, devices=Devices(1)), jax.devices()[:1]
    )


def batches():
    """Bytes of this package's own source."""
    files = sorted(Path(maxtext.__file__).parent.glob("layers/*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    for _ in range(STEPS):
        starts = random.integers(0, text.size - LENGTH - 1, ROWS)
        ids = np.stack([text[start : start + LENGTH + 1] for start in starts])
        batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        for name in ("inputs", "targets"):
            batch |= {
                f"{name}_position": positions,
                f"{name}_segmentation": np.ones_like(positions),
            }
        yield batch


def trained(*overrides):
    """The mean loss of the last steps."""
    context = context_of(*overrides)
    step = compile_train_step(context, ROWS)
    state = initial_state(context)
    losses = []
    for batch in batches():
        state, metrics = step(state, to_devices(context, batch), context.key)
        losses.append(metrics["loss"])
    losses = [float(loss) for loss in losses]
    assert np.mean(losses[-LAST:]) < 0.7 * losses[0]
    return np.mean(losses[-LAST:])


@pytest.fixture(scope="module")
def in_bfloat16():
    return trained()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8_full"])
def test_converges_like_bfloat16(in_bfloat16, quantization):
    assert trained(f"quantization={quantization}") == pytest.approx(in_bfloat16, rel=0.01)


@pytest.mark.exhaustive
def test_experts_converge_like_bfloat16():
    assert trained(*EXPERTS, "quantization=fp8") == pytest.approx(trained(*EXPERTS), rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "rounded"), [("fp8", True), ("int8", False), ("none", False)]
)
def test_expert_matmuls_are_fp8(quantization, rounded):
    context = context_of(*EXPERTS, f"quantization={quantization}", "scan_layers=false")
    program = lower_train_step(context, ROWS).as_text()
    assert ("tensor<4x32x64xf8E4M3FN>" in program) == rounded


def products(*overrides):
    """How many matmuls, forward and backward, have inputs in int8, in e4m3 and in e5m2."""
    context = context_of("scan_layers=false", *overrides)
    batch = {name: jnp.asarray(field) for name, field in next(iter(batches())).items()}

    def loss(weights):
        return jnp.sum(
            context.template.bind(weights)(batch["inputs"], batch["inputs_position"]).astype(
                jnp.float32
            )
        )

    kinds = dict.fromkeys(("int8", "float8_e4m3fn", "float8_e5m2"), 0)
    for inputs in dot_inputs(
        jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(context.random_state).weights).jaxpr
    ):
        for kind in inputs & set(kinds):
            kinds[kind] += 1
    return tuple(kinds.values())


def dot_inputs(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield {variable.aval.dtype.name for variable in equation.invars}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from dot_inputs(inner)


@pytest.mark.parametrize(
    ("quantization", "right"),
    [
        # Seven kernels a layer: forward, and backward to the inputs.
        ("int8", (LAYERS * 7 * 2, 0, 0)),
        ("fp8", (0, LAYERS * 7 * 3, LAYERS * 7 * 2)),
        ("fp8_gpu", (0, LAYERS * 7 * 3, LAYERS * 7 * 2)),
        ("fp8_full", (0, (LAYERS * 7 + 1) * 3, (LAYERS * 7 + 1) * 2)),
        ("none", (0, 0, 0)),
    ],
)
def test_quantized_matmuls_of_each_format(quantization, right):
    assert products(f"quantization={quantization}") == right


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantization=int4"], r"quantization=int4 \(command line\) is for inference"),
        (["checkpoint_is_quantized=true"], "checkpoint_is_quantized=true"),
        (
            ["quantization=te_fp8_currentscaling"],
            "is not implemented: use int8, fp8 or fp8_full for training",
        ),
    ],
)
def test_training_rejects_inference_formats(overrides, message):
    with pytest.raises(ConfigError, match=message):
        context_of(*overrides)


def test_inference_rejects_training_formats():
    overrides = dict(override.split("=") for override in OVERRIDES[:7])
    with pytest.raises(ConfigError, match="quantization=fp8_full .* is for training: use fp8"):
        LLM.load("default", **overrides, quantization="fp8_full")
