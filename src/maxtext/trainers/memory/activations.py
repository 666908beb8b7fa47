"""The activations that each remat policy saves for the backward pass, and the FLOPs that it
recomputes, from the traced loss; nothing runs.

Saved are the residuals of the loss that grow with the batch: JAX determines them, and the rules how
they are sharded. Recomputed are the matmuls of the backward pass beyond those of a step that saves
everything; matmuls inside a library call (cuDNN) are not seen.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.trees import merge_dicts
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.remat import OFFLOADED, SAVED_ON_DEVICE
from maxtext.sharding import AxisRules, use_rules
from maxtext.sharding.memory import ActivationSharding, MemoryBytes, single_device_rules
from maxtext.trainers.build import run_context_from_rules
from maxtext.trainers.model_losses import layer_inputs
from maxtext.trainers.step import TrainState, uses_dropout
from maxtext.trainers.trainable import select

ALIASES = ("minimal_flash",)
ROWS = 1009  # a prime: a dimension that is a multiple of it comes from the batch


@dataclass(frozen=True)
class SavedActivations:
    """Under one policy, on one device: bytes saved in the layers, bytes saved outside of them
    (embedding, head, loss), and recomputed FLOPs as a fraction of those of a forward pass."""

    policy: str
    layers: MemoryBytes
    outer: int
    recompute: float

    @property
    def device(self) -> int:
        return self.layers.device + self.outer


def activations_by_policy(
    config: MaxTextConfig, rules: AxisRules, platform: str = "cpu"
) -> list[SavedActivations]:
    """For a microbatch of the configuration; the policy with the least recomputation comes
    first."""
    reader = ActivationSharding(rules, ROWS, config.max_target_length, feature_names(config))
    rows = config.micro_batch_size_to_train_on
    policies = ["none", *(name for name in SAVED_ON_DEVICE if name not in ALIASES)]
    if config.remat_policy == "custom":
        policies.append("custom")
    device = single_device_rules(platform, rules.mesh.size)
    with use_rules(device):
        traces = {policy: trace(with_policy(config, policy), device) for policy in policies}
        layers_only = trace(with_policy(config, "full"), device, without_head=True)
    full = residual_bytes(traces["full"], reader, rows)
    outer = full.device - residual_bytes(layers_only, reader, rows).device
    step_flops = matmul_flops(traces["none"].jaxpr)
    activations = []
    for policy, traced in traces.items():
        total = residual_bytes(traced, reader, rows)
        recomputed = matmul_flops(traced.jaxpr) - step_flops
        activations.append(
            SavedActivations(
                policy=policy,
                layers=MemoryBytes(total.device - outer, total.host),
                outer=outer,
                recompute=recomputed / (step_flops / 3),
            )
        )
    # Policies with the same recomputation are sorted by what they offload, then by what they save.
    return sorted(
        activations,
        key=lambda saved: (round(saved.recompute, 4), saved.layers.host, saved.layers.device),
    )


def policy_of(config: MaxTextConfig) -> str:
    """The name of the configuration's policy in `activations_by_policy`."""
    return {"": "none", "minimal_flash": "minimal_with_context"}.get(
        config.remat_policy, config.remat_policy
    )


def with_policy(config: MaxTextConfig, policy: str) -> MaxTextConfig:
    """The configuration with another policy. Layers are scanned, which saves the same and traces
    faster. Weights are on the device, since they are not activations."""
    tensors: dict[str, list[str] | None] = {}
    if policy == "none":
        tensors = {"tensors_on_device": None, "tensors_to_offload": None}
    elif policy != "custom":
        tensors = {
            "tensors_on_device": SAVED_ON_DEVICE[policy],
            "tensors_to_offload": OFFLOADED.get(policy, []),
        }
    fixed = {"remat_policy": policy, "scan_layers": True, "parameter_memory_host_offload": False}
    return config.model_copy(update=fixed | tensors)


def feature_names(config: MaxTextConfig) -> dict[int, str]:
    """Logical names of an activation's last dimension, by its size. Of equal sizes the last one
    counts."""
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


def trace(config: MaxTextConfig, device: AxisRules, without_head: bool = False) -> Traced:
    """The loss of one microbatch and its gradient; or the embedding and the layers alone."""
    context = run_context_from_rules(config, device)
    objective, key = context.objective, jax.random.key(0) if uses_dropout(config) else None

    def loss(weights: Tree, reference: Tree, batch: dict[str, jax.Array]) -> Any:
        if without_head:
            rows = objective.model_rows(batch)
            weights = objective.model_weights(weights, reference)
            model = objective.model_template.bind(weights)
            return model.run(rows["inputs"], layer_inputs(config, rows, key))[0]
        losses = objective.losses(weights, reference, batch, key, jnp.int32(0))
        return sum((*losses.sums.values(), *losses.aux_losses.values()), jnp.float32(0))

    def forward_backward(state: TrainState, batch: dict[str, jax.Array]) -> Any:
        frozen = select(state.weights, context.trained, keep=False)
        value, backward = jax.vjp(
            lambda trained: loss(merge_dicts(trained, frozen), state.reference, batch),
            select(state.weights, context.trained),
        )
        return backward, backward(jax.tree.map(jnp.ones_like, value))

    tokens = jax.ShapeDtypeStruct((ROWS, config.max_target_length), jnp.int32)
    batch = dict.fromkeys(context.row_format.fields, tokens) | dict.fromkeys(
        objective.row_fields, jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    )
    batch |= {
        name: jax.ShapeDtypeStruct((*tokens.shape, size), dtype)
        for name, (size, dtype) in objective.token_fields.items()
    }
    jaxpr, shapes = jax.make_jaxpr(forward_backward, return_shape=True)(
        context.abstract_state, batch
    )
    num_residuals = len(jax.tree.leaves(shapes[0]))
    return Traced(jaxpr.jaxpr, jaxpr.jaxpr.outvars[:num_residuals])


def residual_bytes(traced: Traced, reader: ActivationSharding, rows: int) -> MemoryBytes:
    """Residuals that grow with the batch, for `rows` rows. Inputs of the jaxpr are not counted."""
    counted = {id(variable) for variable in traced.jaxpr.invars}
    device = host = 0
    for variable in traced.residuals:
        aval = variable.aval
        if id(variable) in counted or not reader.is_activation(aval.shape):
            continue
        counted.add(id(variable))
        size = reader.bytes(aval.shape, aval.dtype, rows)
        if "host" in str(getattr(aval, "memory_space", "")).lower():
            host += size
        else:
            device += size
    return MemoryBytes(device, host)


def matmul_flops(jaxpr: Any) -> float:
    """FLOPs of the matmuls of a jaxpr and of all jaxprs inside it, 2 per multiply-add."""
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lhs_shape = equation.invars[0].aval.shape
            out_size = math.prod(equation.outvars[0].aval.shape)
            total += 2.0 * out_size * math.prod(lhs_shape[axis] for axis in contracted)
        elif name.startswith("ragged_dot"):
            rows, in_dim = equation.invars[0].aval.shape[:2]
            total += 2.0 * rows * in_dim * equation.invars[1].aval.shape[-1]
        else:
            inner = sum(matmul_flops(jaxpr) for jaxpr in inner_jaxprs(equation))
            total += num_executions(equation) * inner
    return total


def num_executions(equation: Any) -> int:
    """How often the inner jaxprs run: the steps of a scan, the cells of a kernel's grid."""
    if equation.primitive.name == "pallas_call":
        return math.prod(
            size for size in equation.params["grid_mapping"].grid if isinstance(size, int)
        )
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
