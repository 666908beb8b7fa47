"""GPT-2 in Hugging Face folders; GPT-3 has the same layers."""

from collections.abc import Sequence

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    Field,
    FieldGroup,
    HfMapping,
    Json,
    LayerSpecs,
    ModelSettings,
    bool_field,
    hf_activation,
    native_activation,
)
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import LAYERS, NULL, POSITIVE, SIZE, TEXT


def check_heads(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    if config.num_query_heads * config.head_dim != config.emb_dim:
        raise UserError(
            f"GPT-2's heads are as wide as the model together: head_dim={config.head_dim} must be "
            f"{config.emb_dim} / {config.num_query_heads}"
        )
    return {}


def hf_gelu(mlp_activations: Sequence[str]) -> str:
    name = hf_activation(mlp_activations)
    return "gelu_new" if name == "gelu_pytorch_tanh" else name


def gpt2_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    """GPT-2 stores matrices as [inputs, outputs], and queries, keys and values in one tensor."""
    hf, native = "transformer.h.{i}.", "layers/{i}/"
    parts = tuple(f"{native}attention/{name}" for name in ("query", "key", "value"))
    rules = [
        TensorRule("transformer.wte.weight", "embedder/embedding", "v e -> v e"),
        TensorRule("transformer.wpe.weight", "positions/embedding", "p e -> p e"),
        TensorRule("lm_head.weight", "head/weight", "v e -> e v"),
        TensorRule(
            f"{hf}attn.c_attn.weight", f"{native}attention/qkv/weight", "e (g k d) -> e k g d"
        ),
        TensorRule(f"{hf}attn.c_attn.bias", f"{native}attention/qkv/bias", "(g k d) -> k g d"),
        TensorRule(
            f"{hf}attn.c_attn.weight",
            tuple(f"{part}/weight" for part in parts),
            "e (h d) -> e h d",
            join=1,
        ),
        TensorRule(
            f"{hf}attn.c_attn.bias",
            tuple(f"{part}/bias" for part in parts),
            "(h d) -> h d",
            join=0,
        ),
        TensorRule(f"{hf}attn.c_proj.weight", f"{native}attention/out/weight", "(h d) e -> h d e"),
        TensorRule(f"{hf}attn.c_proj.bias", f"{native}attention/out/bias", "e -> e"),
    ]
    for hf_name, name in (("c_fc", "wi"), ("c_proj", "wo")):
        rules.append(
            TensorRule(f"{hf}mlp.{hf_name}.weight", f"{native}mlp/{name}/weight", "n o -> n o")
        )
        rules.append(TensorRule(f"{hf}mlp.{hf_name}.bias", f"{native}mlp/{name}/bias", "o -> o"))
    norms = {f"{hf}ln_1": f"{native}attention_norm", f"{hf}ln_2": f"{native}mlp_norm"}
    for hf_name, name in (norms | {"transformer.ln_f": "final_norm"}).items():
        rules.append(TensorRule(f"{hf_name}.weight", f"{name}/scale", "e -> e"))
        rules.append(TensorRule(f"{hf_name}.bias", f"{name}/bias", "e -> e"))
    return rules


GPT2 = HfMapping(
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    keys={
        "decoder_block": "gpt3",
        "normalize_embedding_logits": False,
        "fused_qkv": True,
        "enable_dropout": False,
    },
    fields=(
        Field("vocab_size", "vocab_size", 50_257),
        Field("n_embd", "base_emb_dim", 768, kind=SIZE, aliases=("hidden_size",)),
        Field(
            "n_head",
            ("base_num_kv_heads", "base_num_query_heads"),
            12,
            kind=SIZE,
            aliases=("num_attention_heads",),
        ),
        Field(
            "n_layer", "base_num_decoder_layers", 12, kind=LAYERS, aliases=("num_hidden_layers",)
        ),
        Field(
            "n_inner", "base_mlp_dim", null=lambda entries: 4 * entries["n_embd"], kind=SIZE | NULL
        ),
        Field(
            "n_positions",
            "trainable_position_size",
            1024,
            kind=SIZE,
            aliases=("max_position_embeddings",),
        ),
        Field(
            "activation_function",
            "mlp_activations",
            "gelu_new",
            to_native=lambda name: [native_activation(name)],
            to_hf=hf_gelu,
            kind=TEXT | NULL,
        ),
        Field("layer_norm_epsilon", "normalization_layer_epsilon", 1e-5, kind=POSITIVE),
        bool_field("tie_word_embeddings", "logits_via_embedding", True),
        FieldGroup(
            read=lambda entries: ModelSettings(
                {"head_dim": entries["n_embd"] // entries["n_head"]}
            ),
            write=check_heads,
        ),
        Field("scale_attn_weights", supported=(True,)),
        Field("scale_attn_by_inverse_layer_idx", supported=(False,)),
        Field("add_cross_attention", supported=(False,)),
    ),
    rules=gpt2_rules,
    ignored=(r".*\.attn\.(masked_)?bias",),
    base_prefix="transformer.",
    embedding="transformer.wte.weight",
)
