"""GPT-2 in Hugging Face folders; GPT-3 has the same layers."""

from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    HfMapping,
    Json,
    ModelSettings,
    hf_activation,
    native_activation,
)
from maxtext.hf.rules import Rule
from maxtext.hf.schema import LAYERS, NULL, POSITIVE, SIZE, TEXT, all_of
from maxtext.models.hf_config import LayerSpecs


def read_gpt2(hf_config: Json) -> ModelSettings:
    embed_dim, heads = hf_config["n_embd"], hf_config["n_head"]
    keys = {
        "decoder_block": "gpt3",
        "base_emb_dim": embed_dim,
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
        "head_dim": embed_dim // heads,
        "base_mlp_dim": hf_config["n_inner"] or 4 * embed_dim,
        "base_num_decoder_layers": hf_config["n_layer"],
        "vocab_size": hf_config["vocab_size"],
        "mlp_activations": [native_activation(hf_config["activation_function"])],
        "normalization_layer_epsilon": hf_config["layer_norm_epsilon"],
        "trainable_position_size": hf_config["n_positions"],
        "logits_via_embedding": hf_config["tie_word_embeddings"],
        "normalize_embedding_logits": False,
        "fused_qkv": True,
        "enable_dropout": False,
    }
    return ModelSettings(keys)


def write_gpt2(config: MaxTextConfig, layers: LayerSpecs) -> Json:
    name = hf_activation(config)
    if config.num_query_heads * config.head_dim != config.emb_dim:
        raise UserError(
            f"GPT-2's heads are as wide as the model together: head_dim={config.head_dim} must be "
            f"{config.emb_dim} / {config.num_query_heads}"
        )
    return {
        "n_embd": config.emb_dim,
        "n_head": config.num_query_heads,
        "n_inner": config.mlp_dim,
        "n_layer": config.num_decoder_layers,
        "n_positions": config.trainable_position_size,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new" if name == "gelu_pytorch_tanh" else name,
        "layer_norm_epsilon": config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
    }


def gpt2_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[Rule]:
    """GPT-2 stores matrices as [inputs, outputs], and queries, keys and values in one tensor."""
    hf, native = "transformer.h.{i}.", "layers/{i}/"
    parts = tuple(f"{native}attention/{name}" for name in ("query", "key", "value"))
    rules = [
        Rule("transformer.wte.weight", "embedder/embedding", "v e -> v e"),
        Rule("transformer.wpe.weight", "positions/embedding", "p e -> p e"),
        Rule("lm_head.weight", "head/weight", "v e -> e v"),
        Rule(f"{hf}attn.c_attn.weight", f"{native}attention/qkv/weight", "e (g k d) -> e k g d"),
        Rule(f"{hf}attn.c_attn.bias", f"{native}attention/qkv/bias", "(g k d) -> k g d"),
        Rule(
            f"{hf}attn.c_attn.weight",
            tuple(f"{part}/weight" for part in parts),
            "e (h d) -> e h d",
            join=1,
        ),
        Rule(
            f"{hf}attn.c_attn.bias",
            tuple(f"{part}/bias" for part in parts),
            "(h d) -> h d",
            join=0,
        ),
        Rule(f"{hf}attn.c_proj.weight", f"{native}attention/out/weight", "(h d) e -> h d e"),
        Rule(f"{hf}attn.c_proj.bias", f"{native}attention/out/bias", "e -> e"),
    ]
    for hf_name, name in (("c_fc", "wi"), ("c_proj", "wo")):
        rules.append(Rule(f"{hf}mlp.{hf_name}.weight", f"{native}mlp/{name}/weight", "n o -> n o"))
        rules.append(Rule(f"{hf}mlp.{hf_name}.bias", f"{native}mlp/{name}/bias", "o -> o"))
    norms = {f"{hf}ln_1": f"{native}attention_norm", f"{hf}ln_2": f"{native}mlp_norm"}
    for hf_name, name in (norms | {"transformer.ln_f": "final_norm"}).items():
        rules.append(Rule(f"{hf_name}.weight", f"{name}/scale", "e -> e"))
        rules.append(Rule(f"{hf_name}.bias", f"{name}/bias", "e -> e"))
    return rules


GPT2 = HfMapping(
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    read=read_gpt2,
    write=write_gpt2,
    rules=gpt2_rules,
    ignored=(r".*\.attn\.(masked_)?bias",),
    defaults={
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_inner": None,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    supported={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    fields={
        **all_of(SIZE, "n_embd", "n_head", "n_positions"),
        **all_of(LAYERS, "n_layer"),
        **all_of(SIZE | NULL, "n_inner"),
        **all_of(POSITIVE, "layer_norm_epsilon"),
        **all_of(TEXT | NULL, "activation_function"),
    },
    base_prefix="transformer.",
    embedding="transformer.wte.weight",
)
