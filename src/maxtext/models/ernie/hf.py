"""ERNIE 4.5, the dense models, in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import Field, HfMapping, LayerSpecs, dense_fields, dense_keys
from maxtext.hf.layer_rules import dense_rules
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import BOOL, NULL
from maxtext.models.hf_config import uniform_rope


def ernie4_5_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    return dense_rules(config)


ERNIE4_5 = HfMapping(
    architectures=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    keys=dense_keys("ernie4_5"),
    fields=(
        *dense_fields(
            vocab_size=103_424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            max_position_embeddings=131_072,
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        Field("use_bias", ("attention_bias", "mlp_bias"), False, to_native=bool, kind=BOOL | NULL),
        uniform_rope(interleave=True, rope_theta=500_000.0),
    ),
    rules=ernie4_5_rules,
)
