"""Rules of the model keys that need the layers: norms, MLPs, add-ons, tensors saved by remat."""

from maxtext.configs.problems import ProblemKind
from maxtext.layers.specs import ACTIVATION_NAMES
from maxtext.models.capabilities import Capabilities
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
