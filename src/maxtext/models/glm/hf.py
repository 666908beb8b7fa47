"""GLM-4.5 and 4.6 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    ATTENTION_BIAS,
    Field,
    FieldGroup,
    HfMapping,
    LayerSpecs,
    bool_field,
    dense_fields,
    dense_keys,
)
from maxtext.hf.layer_rules import (
    PRE_NORMS,
    attention_rules,
    norm_rules,
    outer_rules,
)
from maxtext.hf.rules import TensorRule
from maxtext.models.deepseek.hf import (
    expert_fields,
    ignored_layers,
    numbered_mtp_rules,
    routed_mlp_rules,
)
from maxtext.models.hf_config import MTP_AFTER_NORMS, uniform_rope


def glm4_moe_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    layer_rules = [*norm_rules(PRE_NORMS), *attention_rules(config), *routed_mlp_rules()]
    return [*outer_rules(), *layer_rules, *numbered_mtp_rules(config, layer_rules)]


GLM4_MOE = HfMapping(
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    keys=dense_keys("glm4_moe", routed_bias=True),
    fields=(
        *dense_fields(
            vocab_size=151_552,
            hidden_size=4096,
            intermediate_size=10_944,
            num_hidden_layers=46,
            num_attention_heads=96,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
        ),
        ATTENTION_BIAS,
        bool_field("use_qk_norm", "use_qk_norm"),
        uniform_rope(partial=True, partial_rotary_factor=0.5),
        *expert_fields(
            num_experts=128,
            aliases=("num_local_experts",),
            per_token=8,
            shared=1,
            dim=1408,
            scaling=1.0,
            groups=1,
            chosen_groups=1,
            num_dense=1,
        ),
        bool_field("norm_topk_prob", "norm_topk_prob", True),
        MTP_AFTER_NORMS,
        FieldGroup(
            (Field("num_nextn_predict_layers"),),  # which transformers' model does not have
            write=lambda config, layers: {"num_nextn_predict_layers": config.mtp_num_layers},
        ),
    ),
    rules=glm4_moe_rules,
    ignored_in=ignored_layers,
)
