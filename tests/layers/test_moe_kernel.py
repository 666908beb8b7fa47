"""The key `megablox` selects the grouped matmul kernel for Hopper GPUs."""

import jax
import jax.numpy as jnp
import pytest

from maxtext.configs.derive import Devices
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.models.common import moe_spec, router_spec
from maxtext.models.configuration import load


@pytest.mark.parametrize(
    ("override", "kernel"), [("megablox=true", True), ("megablox=false", False)]
)
def test_megablox_selects_the_hopper_kernel(override, kernel):
    """In the program for such a GPU."""
    overrides = [
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "base_emb_dim=64",
        "base_mlp_dim=128",
    ]
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
