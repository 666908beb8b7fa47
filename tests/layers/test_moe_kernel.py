"""The key `megablox` selects the grouped matmul kernel for Hopper GPUs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.kernels.weight_only import quantize_weight
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.models.common import moe_spec, router_spec
from maxtext.models.configuration import load
from maxtext.models.transformer import refuse_absent_kernels
from maxtext.trainers.build import build_run_context
from tests.layers.gpu_context import interpreted_kernels

EXPERTS = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2"]
HOPPER = BuildContext("gpu", 1, "9.0", dtype="bfloat16")


@pytest.mark.parametrize(
    ("override", "kernel"), [("megablox=true", True), ("megablox=false", False)]
)
def test_megablox_selects_the_hopper_kernel(override, kernel):
    """In the program for such a GPU."""
    overrides = [*EXPERTS, "base_emb_dim=64", "base_mlp_dim=128"]
    config = load(None, [*overrides, override], environ={}, devices=Devices(1))
    built = Template.of(
        lambda: moe_spec(config, router_spec(config)).build(
            Initializer(None, "float32", context=BuildContext("gpu")), 64, "bfloat16"
        )
    )
    x, positions = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16), jnp.zeros((2, 64), jnp.int32)
    program = str(
        jax.make_jaxpr(lambda weights, x: built.bind(weights)(x, LayerInputs(positions))[0])(
            built.weights, x
        )
    )
    assert ("mosaic_gpu" in program or "grouped_matmul" in program) == kernel
    assert ("ragged_dot" in program) != kernel


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"platform": "cpu", "capability": ""}, "on a CPU"),
        ({"capability": "10.0"}, "on a GPU of compute capability 10.0"),
        ({"num_devices": 2}, "on 2 devices"),
        ({"dtype": "float32"}, "in float32"),
    ],
)
def test_turning_off_an_absent_kernel_is_refused(changes, reason):
    config = load(None, [*EXPERTS, "megablox=false"], environ={}, devices=Devices(1))
    context = replace(HOPPER, **changes)
    if reason is None:
        refuse_absent_kernels(config, context)
    else:
        with pytest.raises(ConfigError, match=f"megablox=false .* would do nothing {reason}: "):
            refuse_absent_kernels(config, context)
    refuse_absent_kernels(load(None, EXPERTS, environ={}, devices=Devices(1)), context)


def test_training_and_generation_refuse_to_turn_off_an_absent_kernel():
    message = "megablox=false .* would do nothing on a CPU"
    config = load(None, [*EXPERTS, "megablox=false"], environ={}, devices=Devices(1))
    with pytest.raises(ConfigError, match=message):
        build_run_context(config)
    with pytest.raises(ConfigError, match=message):
        LLM.from_config(config)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "mxfp4"])
def test_kernel_for_selected_experts_equals_all_experts(quantization, rows):
    """The kernel, interpreted, with the reference's choice of experts; weights are dequantized for
    the reference."""
    keys = ["base_emb_dim=64", "base_mlp_dim=96", "dtype=bfloat16"]
    config = load(None, [*EXPERTS, *keys], environ={}, devices=Devices(1))

    def template(context):
        spec = moe_spec(config, router_spec(config))
        return Template.of(
            lambda: spec.build(Initializer(None, "bfloat16", context=context), 64, "bfloat16")
        )

    reference, fast = template(BuildContext()), template(replace(HOPPER, mode="inference"))
    random = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 8, leaf.dtype), reference.weights
    )
    quantized = {
        name: {"weight": quantize_weight(layer["weight"], (1,), quantization)}
        for name, layer in weights["experts"].items()
    }
    plain = {
        name: {"weight": layer["weight"].astype(jnp.bfloat16)} for name, layer in quantized.items()
    }
    x = jnp.asarray(random.normal(size=(rows, 1, 64)), jnp.bfloat16)
    inputs = LayerInputs(jnp.zeros((rows, 1), jnp.int32))
    with interpreted_kernels() as names:
        moe = fast.bind(weights | {"experts": quantized})
        actual, _ = moe.decode(x, inputs)
    assert "expert_matmul" in names
    expected, _ = reference.bind(weights | {"experts": plain})(x, inputs)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=0.02
    )
    assert np.abs(np.asarray(expected, np.float32)).max() > 0.5  # so that the tolerance means much
