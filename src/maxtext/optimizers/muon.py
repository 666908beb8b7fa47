"""Muon: the momentum of a matrix, made nearly orthogonal by five Newton-Schulz steps.

What is a matrix follows from the logical axis names of a parameter:

- axes that count copies (stacked layers, experts) and unnamed ones are not part of it: each copy
  has its own matrix;
- the axes of attention heads (heads, their size, q/k/v of a fused kernel) are one side together, so
  a query kernel is embed -> (heads * dim) and the output projection (heads * dim) -> embed;
- whatever has a vocabulary or norm axis (embedding, head, norms), or no two sides (biases, sinks,
  routers, depthwise convolutions), is no matrix and takes AdamW.

The momentum is Optax's: m = b m + (1-b) g, then the Nesterov estimate with Adam's bias correction,
b m / (1 - b^(t+1)) + (1-b) g / (1 - b^t). The orthogonal matrix is scaled by sqrt(max(1, out /
in)), or, when muon_consistent_rms is set, by muon_consistent_rms * sqrt(max(in, out)).
"""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.optimizers.moments import computed_in_float32

AxisNames = tuple[str | None, ...]

# Axes that count copies of a parameter. None, an unnamed axis (gate and up of a fused MLP,
# positions), is one of them.
COPIES = {
    "layers", "dense_layers", "moe_layers", "local_layers", "circular_repeats", "diloco", "exp", "exp_with_fsdp", None,
}  # fmt: skip
# Axes that together are one side of an attention matrix.
HEADS = {"heads", "q_heads", "kv_heads", "qkv", "kv", "kv_head_dim", "gdn_head"}
NEVER = {"vocab", "embed_vocab", "norm"}


def dimension_numbers(path: str, axes: AxisNames) -> MuonDimensionNumbers | None:
    """Which axes are the input and which the output of the matrix; None when the parameter is no
    matrix.
    """
    if NEVER & set(axes):
        return None
    heads = tuple(index for index, name in enumerate(axes) if name in HEADS)
    widths = tuple(index for index, name in enumerate(axes) if name not in COPIES | HEADS)
    if not widths or len(heads + widths) < 2:
        return None
    if heads and len(widths) == 1:
        inputs, outputs = (heads, widths) if widths[0] > max(heads) else (widths, heads)
    elif not heads and len(widths) == 2:
        inputs, outputs = widths[:1], widths[1:]
    else:
        raise ConfigError(
            f"opt_type=muon cannot tell the input from the output axes of {path} with axes {axes}: use opt_type=adamw"
        )
    return MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)


def scale_by_muon(config: MaxTextConfig, dimensions: Any) -> optax.GradientTransformation:
    """`dimensions` has the parameters' structure, with optax.MaskedNode at those that take another
    rule.
    """
    momentum = optax.contrib.scale_by_muon(
        beta=config.muon_beta, weight_dimension_numbers=dimensions
    )

    def scaled(update: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
        inputs = math.prod(update.shape[axis] for axis in numbers.reduction_axis)
        outputs = math.prod(update.shape[axis] for axis in numbers.output_axis)
        if config.muon_consistent_rms is None:
            return update * math.sqrt(max(1.0, outputs / inputs))
        return update * (config.muon_consistent_rms * math.sqrt(max(inputs, outputs)))

    by_shape = optax.stateless(lambda updates, params: jax.tree.map(scaled, updates, dimensions))
    return optax.chain(computed_in_float32(momentum, config), by_shape)
