"""Rules of the mixture-of-experts keys that need the layers."""

from collections.abc import Callable

from maxtext.models.capabilities import Capabilities, changed
from maxtext.models.rule import inert_unless, inert_unless_layers_depend

NEEDS_EXPERTS = "num_experts above 1 in {blocks}"
# Keys that may leave no layer with experts: a value with which some layer has, and what to set.
DENSE_LAYER_KEYS = (
    ("first_num_dense_layers", 0, "first_num_dense_layers below the number of layers"),
    ("interleave_moe_layer_step", 1, "interleave_moe_layer_step up to the number of layers"),
)


def has_experts(model: Capabilities) -> bool:
    return model.has_experts


def some_expert_layer(otherwise: str) -> Callable[[Capabilities], str]:
    """What a model with experts needs to have a layer with them, or else `otherwise`."""

    def requirement(model: Capabilities) -> str:
        if model.has_experts or model.config.num_experts == 1:
            return otherwise
        for key, value, needed in DENSE_LAYER_KEYS:
            if Capabilities(changed(model.config, **{key: value})).has_experts:
                return f"{needed}, {model.config.num_decoder_layers}"
        return otherwise

    return requirement


def saves_custom_tensors(model: Capabilities) -> bool:
    return model.config.remat_policy == "custom"


def sums_weighted_outputs(model: Capabilities) -> bool:
    """The outputs of experts are weighted, rather than their inputs."""
    return any(
        not (spec.apply_router_weight_on_input and spec.method == "sparse")
        for spec in model.moe_specs
    )


def has_selection_bias(model: Capabilities) -> bool:
    """The router's bias, if there is one, chooses experts, and training balances their load."""
    biased = Capabilities(changed(model.config, routed_bias=True))
    return any(spec.router.bias == "selection" for spec in biased.moe_specs)


inert_unless_layers_depend(some_expert_layer("{blocks}"), "num_experts")
inert_unless(
    has_experts,
    some_expert_layer(NEEDS_EXPERTS),
    "num_experts_per_tok",
    "base_moe_mlp_dim",
    "capacity_factor",
    "ragged_buffer_factor",
    "load_balance_loss_weight",
    "use_random_routing",
    "norm_topk_prob",
    "float32_gate_logits",
    "routed_scaling_factor",
    "n_routing_groups",
    "topk_routing_group",
    "sparse_matmul",
    "megablox",
    "use_custom_sort_vjp",
    "use_ring_of_experts",
    "moe_fsdp_use_two_stage_all_gather",
    "shard_exp_on_fsdp",
)
inert_unless(has_experts, some_expert_layer(NEEDS_EXPERTS), "float32_weight_sum", "shared_experts")
inert_unless(
    lambda model: not model.has_experts or sums_weighted_outputs(model),
    "a decoder_block other than {block}, which weights the inputs of experts and always sums in "
    "float32",
    "float32_weight_sum",
)
inert_unless_layers_depend(
    "a decoder_block other than {block}, which has one shared MLP",
    "shared_experts",
    given=lambda model: model.has_experts and model.config.shared_experts > 1,
)
inert_unless_layers_depend("{blocks} and num_experts above 1", "interleave_moe_layer_step")
inert_unless_layers_depend("{blocks} and num_experts above 1", "first_num_dense_layers")
inert_unless_layers_depend("{blocks} and num_experts above 1", "routed_score_func", "routed_bias")
inert_unless(has_selection_bias, "{blocks} and num_experts above 1", "routed_bias_update_rate")
inert_unless(
    lambda model: saves_custom_tensors(model) and model.has_experts,
    f"remat_policy=custom and {NEEDS_EXPERTS}",
    "moe_mlpwo",
)
inert_unless(
    lambda model: (
        saves_custom_tensors(model) and model.has_experts and len(model.config.mlp_activations) == 2
    ),
    f"remat_policy=custom, two activations and {NEEDS_EXPERTS}",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
)
