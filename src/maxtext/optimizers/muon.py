"""Muon: the momentum of a matrix, orthogonalized by five Newton-Schulz iterations.

The logical axis names of a parameter say what is a matrix:

- batch axes (stacked layers, experts) and unnamed axes are not part of it: each index has its own
  matrix;
- the axes of attention heads (heads, head_dim, q/k/v of a packed projection) are merged into one
  dimension: the query projection is embed -> (heads * dim), the output projection (heads * dim) ->
  embed;
- parameters with a vocabulary or norm axis (embedding, head, norms), and those without two
  dimensions (biases, sinks, routers, depthwise convolutions), are not matrices and use AdamW.

The momentum is Optax's: m = b m + (1-b) g, then the Nesterov estimate with Adam's bias correction,
b m / (1 - b^(t+1)) + (1-b) g / (1 - b^t). The orthogonal matrix is scaled by sqrt(max(1, out /
in)), or, when muon_consistent_rms is set, by muon_consistent_rms * sqrt(max(in, out)).
"""

import math

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from maxtext.common.errors import ConfigError
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.optimizers.moments import in_float32

AxisNames = tuple[str | None, ...]

# Axes whose indices have separate matrices. None is an unnamed axis (gate and up of a packed MLP,
# positions).
BATCH_AXES = {
    "layers",
    "dense_layers",
    "moe_layers",
    "local_layers",
    "circular_repeats",
    "diloco",
    "exp",
    "exp_with_fsdp",
    None,
}
# Axes that are merged into one dimension of an attention matrix.
HEAD_AXES = {"heads", "q_heads", "kv_heads", "qkv", "kv", "kv_head_dim", "gdn_head"}
NON_MATRIX_AXES = {"vocab", "embed_vocab", "norm"}


def dimension_numbers(path: str, axes: AxisNames) -> MuonDimensionNumbers | None:
    """The input and the output axes of a matrix; None if the parameter is not a matrix.

    Raises ConfigError if the axis names are ambiguous.
    """
    if NON_MATRIX_AXES & set(axes):
        return None
    heads = tuple(index for index, name in enumerate(axes) if name in HEAD_AXES)
    features = tuple(index for index, name in enumerate(axes) if name not in BATCH_AXES | HEAD_AXES)
    if not features or len(heads + features) < 2:
        return None
    if heads and len(features) == 1:
        inputs, outputs = (heads, features) if features[0] > max(heads) else (features, heads)
    elif not heads and len(features) == 2:
        inputs, outputs = features[:1], features[1:]
    else:
        raise ConfigError(
            f"opt_type=muon cannot tell the input from the output axes of {path} with axes {axes}: "
            "use opt_type=adamw"
        )
    return MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)


def scale_by_muon(config: MaxTextConfig, dimensions: Tree) -> optax.GradientTransformation:
    """`dimensions`: the tree of parameters, with optax.MaskedNode for those of other groups."""
    momentum = optax.contrib.scale_by_muon(
        beta=config.muon_beta, weight_dimension_numbers=dimensions
    )

    def scale(update: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
        fan_in = math.prod(update.shape[axis] for axis in dims.reduction_axis)
        fan_out = math.prod(update.shape[axis] for axis in dims.output_axis)
        if config.muon_consistent_rms is None:
            return update * math.sqrt(max(1.0, fan_out / fan_in))
        return update * (config.muon_consistent_rms * math.sqrt(max(fan_in, fan_out)))

    scale_by_shape = optax.stateless(
        lambda updates, params: jax.tree.map(scale, updates, dimensions)
    )
    return optax.chain(in_float32(momentum, config), scale_by_shape)
