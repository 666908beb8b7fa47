"""Rules of the model keys that need the layers: norms, MLPs, experts, add-ons, tensors that remat
saves."""

from collections.abc import Callable

from maxtext.configs.problems import ProblemKind
from maxtext.layers.specs import ACTIVATION_NAMES
from maxtext.models.capabilities import Capabilities, changed
from maxtext.models.rule import inert_unless, inert_unless_layers_depend, layer_rule

inert_unless(
    lambda model: model.has_sequential_blocks,
    "a decoder_block that applies attention and MLP in sequence",
    "use_post_attn_norm",
    "use_post_ffw_norm",
)
inert_unless(lambda model: model.has_mlp, "a layer with a dense MLP", "fused_mlp")
inert_unless(
    lambda model: model.has_mlp or model.depends_on("mlp_bias"),
    "a dense MLP, or experts with biases",
    "mlp_bias",
)
inert_unless_layers_depend("{blocks}", "attention_output_dim", "moe_expert_input_dim")
inert_unless(
    lambda model: (
        model.has_residual_blocks
        and (model.config.enable_dropout or model.config.source("enable_dropout").is_user)
    ),
    "enable_dropout=true and a decoder_block with dropout (not simple, simple_mlp or "
    "qwen3_custom_moe)",
    "dropout_rate",
)
# remat_policy=custom can save only tensors that the model has.
inert_unless(
    lambda model: model.has_residual_blocks,
    "a decoder_block whose layer inputs can be saved",
    "decoder_layer_input",
)
inert_unless(
    lambda model: (
        len(model.config.mlp_activations) == 1 or (model.config.fused_mlp and model.has_mlp)
    ),
    "fused_mlp=true or one activation",
    "mlpwi",
)
inert_unless(
    lambda model: (
        model.has_mixers
        and len(model.config.mlp_activations) == 2
        and (not model.config.fused_mlp or model.has_experts)
    ),
    "two activations and fused_mlp=false",
    "mlpwi_0",
    "mlpwi_1",
)


@layer_rule("mlp_activations")
def activations_are_known(model: Capabilities) -> str | None:
    names = model.config.mlp_activations
    unknown = [name for name in names if name not in ACTIVATION_NAMES]
    if unknown:
        return (
            f"mlp_activations has unknown names {', '.join(unknown)}: use "
            f"{', '.join(ACTIVATION_NAMES)}"
        )
    return None


@layer_rule("base_mlp_dim", ProblemKind.INERT)
def some_layer_has_a_dense_mlp(model: Capabilities) -> str | None:
    config = model.config
    if (
        config.source("base_mlp_dim").is_user
        and model.has_experts
        and not model.has_dense_mlp
        and config.base_moe_mlp_dim not in (-1, config.base_mlp_dim)
    ):
        return (
            f"base_mlp_dim={config.base_mlp_dim} ({config.source('base_mlp_dim')}) would do "
            "nothing: all layers have experts, whose width is "
            f"base_moe_mlp_dim={config.base_moe_mlp_dim}; leave one of the two out"
        )
    return None


@layer_rule("moe_expert_input_dim")
def experts_read_the_attention_output(model: Capabilities) -> str | None:
    """In layers whose feed-forward reads the output of attention instead of the residual."""
    config = model.config
    if all(
        layer.attention.output_dim == layer.mlp_dim
        for layer in model.layers
        if hasattr(layer, "mlp_dim")
    ):
        return None
    return (
        f"moe_expert_input_dim={config.moe_expert_input_dim} must equal "
        f"attention_output_dim={config.attention_output_dim}: experts read the output of attention"
    )


@layer_rule("decoder_block")
def block_supports_add_ons(model: Capabilities) -> str | None:
    config = model.config
    name = config.decoder_block.value
    if config.mtp_num_layers and not model.has_residual_blocks:
        return (
            f"mtp_num_layers={config.mtp_num_layers} does not go with decoder_block={name}: its "
            "layers do not support multi-token prediction"
        )
    if config.mhc_expansion_rate > 1 and not model.has_sequential_blocks:
        return (
            f"mhc_expansion_rate={config.mhc_expansion_rate} does not go with "
            f"decoder_block={name}: hyper-connections need a block that applies attention and MLP "
            "in sequence"
        )
    return None


@layer_rule("engram_layers")
def engram_layers_exist(model: Capabilities) -> str | None:
    config, last = model.config, len(model.layers) - 1
    outside = [layer for layer in config.engram_layers if not 0 <= layer <= last]
    if outside:
        return f"engram_layers {outside} are outside 0..{last}"
    if len(set(config.engram_layers)) != len(config.engram_layers):
        return f"engram_layers={config.engram_layers} names a layer more than once"
    return None


NEEDS_EXPERTS = "num_experts above 1 in {blocks}"
# Keys that may leave no layer with experts: a value with which some layer has, and what to set.
DENSE_LAYER_KEYS = (
    ("first_num_dense_layers", 0, "first_num_dense_layers below the number of layers"),
    ("interleave_moe_layer_step", 1, "interleave_moe_layer_step up to the number of layers"),
)


def has_experts(model: Capabilities) -> bool:
    return model.has_experts


def some_expert_layer(otherwise: str) -> Callable[[Capabilities], str]:
    """The setting by which a model with experts gets a layer with them, or else `otherwise`."""

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
