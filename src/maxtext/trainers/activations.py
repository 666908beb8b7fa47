"""What each remat policy keeps for the backward pass and what it computes again, from the traced
loss; nothing runs.

Kept are the residuals of the loss that grow with the batch: JAX decides what they are, the rules
how they are split. Computed again are matrix products of the backward pass beyond those of a step
that keeps everything; products inside a library's call (cuDNN) are not seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.configs.remat import OFFLOADED, SAVED_ON_DEVICE
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import FIELDS
from maxtext.models.transformer import make_template
from maxtext.sharding import AxisRules, use_rules
from maxtext.sharding.memory import ActivationSharding, MemoryBytes, single_device_rules
from maxtext.trainers.losses import language_model_losses, layer_inputs

ALIASES = ("minimal_flash",)
ROWS = 1009  # a prime: a size that is a multiple of it comes from the batch


@dataclass(frozen=True)
class Kept:
    """Under one policy, on one device: bytes in the layers, bytes around them (embedding, head,
    loss), and products computed again as a fraction of a forward pass."""

    policy: str
    layers: MemoryBytes
    around: int
    again: float

    @property
    def device(self) -> int:
        return self.layers.device + self.around


def kept_by_policy(config: MaxTextConfig, rules: AxisRules, platform: str = "cpu") -> list[Kept]:
    """For a micro-batch of the configuration; the policy that computes least again comes first."""
    reader = ActivationSharding(rules, ROWS, config.max_target_length, features(config))
    rows = config.micro_batch_size_to_train_on
    names = ["none", *(name for name in SAVED_ON_DEVICE if name not in ALIASES)]
    if config.remat_policy == "custom":
        names.append("custom")
    with use_rules(single_device_rules(platform, rules.mesh.size)):
        traces = {name: trace(under(config, name)) for name in names}
        layers = trace(under(config, "full"), run_only=True)
    around = kept(traces["full"], reader, rows) - kept(layers, reader, rows)
    everything = products(traces["none"].jaxpr)
    found = []
    for name, traced in traces.items():
        total = kept(traced, reader, rows)
        again = (products(traced.jaxpr) - everything) / (everything / 3)
        found.append(
            Kept(name, MemoryBytes(total.device - around.device, total.host), around.device, again)
        )
    # Of policies that compute the same again, the one that keeps least, and moves least to the
    # host.
    return sorted(
        found, key=lambda kept: (round(kept.again, 4), kept.layers.host, kept.layers.device)
    )


def policy_of(config: MaxTextConfig) -> str:
    """The name in the table of the configuration's policy."""
    return {"": "none", "minimal_flash": "minimal_with_context"}.get(
        config.remat_policy, config.remat_policy
    )


def under(config: MaxTextConfig, policy: str) -> Any:
    """The configuration with another policy. Layers are scanned, since one keeps the same either
    way and they trace faster; and weights are where they are used, since they are not
    activations."""
    places: dict[str, Any] = {}
    if policy == "none":
        places = {"tensors_on_device": None, "tensors_to_offload": None}
    elif policy != "custom":
        places = {
            "tensors_on_device": SAVED_ON_DEVICE[policy],
            "tensors_to_offload": OFFLOADED.get(policy, []),
        }
    fixed = {"remat_policy": policy, "scan_layers": True, "parameter_memory_host_offload": False}
    return config.model_copy(update=fixed | places)


def features(config: MaxTextConfig) -> dict[int, str]:
    """Sizes of an activation's last dimensions and their logical names; of equal sizes the last
    named counts.
    """
    return {
        config.vocab_size: "activation_vocab",
        config.moe_mlp_dim: "activation_mlp",
        config.mlp_dim: "activation_mlp",
        config.num_query_heads: "activation_heads",
        config.num_kv_heads: "activation_kv_heads",
        config.emb_dim: "activation_embed",
    }


@dataclass(frozen=True)
class Traced:
    jaxpr: Any
    residuals: list[Any]  # variables of the jaxpr


def trace(config: MaxTextConfig, run_only: bool = False) -> Traced:
    """The loss of one micro-batch, or only the embedding and the layers, with its gradient."""
    template = make_template(config)
    field = jax.ShapeDtypeStruct((ROWS, config.max_target_length), jnp.int32)

    def loss(weights: Any, batch: dict[str, jax.Array]) -> Any:
        key = jax.random.key(0) if config.enable_dropout and config.dropout_rate > 0 else None
        if run_only:
            return template.bind(weights).run(batch["inputs"], layer_inputs(config, batch, key))[0]
        losses = language_model_losses(config, template, weights, batch, key)
        return sum((*losses.sums.values(), *losses.aux_losses.values()), jnp.float32(0))

    def both(weights: Any, batch: dict[str, jax.Array]) -> Any:
        value, backward = jax.vjp(lambda weights: loss(weights, batch), weights)
        return backward, backward(jax.tree.map(jnp.ones_like, value))

    jaxpr, shapes = jax.make_jaxpr(both, return_shape=True)(
        template.weights, dict.fromkeys(FIELDS, field)
    )
    count = len(jax.tree.leaves(shapes[0]))
    return Traced(jaxpr.jaxpr, jaxpr.jaxpr.outvars[:count])


def kept(traced: Traced, reader: ActivationSharding, rows: int) -> "Total":
    given = {id(variable) for variable in traced.jaxpr.invars}
    seen: set[int] = set()
    device = host = 0
    for variable in traced.residuals:
        value = variable.aval
        if id(variable) in given | seen or not reader.is_activation(value.shape):
            continue
        seen.add(id(variable))
        size = reader.bytes(value.shape, value.dtype, rows)
        if "host" in str(getattr(value, "memory_space", "")).lower():
            host += size
        else:
            device += size
    return Total(device, host)


@dataclass(frozen=True)
class Total(MemoryBytes):
    def __sub__(self, other: MemoryBytes) -> MemoryBytes:
        return MemoryBytes(self.device - other.device, self.host - other.host)


def products(jaxpr: Any) -> float:
    """FLOPs of the matrix products of a jaxpr and of all inside it, 2 for a multiply-add."""
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += (
                2.0
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(left[at] for at in contracted)
            )
        elif name.startswith("ragged_dot"):
            rows, width = equation.invars[0].aval.shape[:2]
            total += 2.0 * rows * width * equation.invars[1].aval.shape[-1]
        else:
            total += runs(equation) * sum(products(inner) for inner in inner_jaxprs(equation))
    return total


def runs(equation: Any) -> int:
    """How often what is inside runs: the steps of a scan, the cells of a kernel's grid."""
    if equation.primitive.name == "pallas_call":
        return math.prod(
            size for size in equation.params["grid_mapping"].grid if isinstance(size, int)
        )
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner
