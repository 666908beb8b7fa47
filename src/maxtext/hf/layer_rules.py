"""Tensor rules that many families share. Rules whose weights a model lacks are skipped."""

from collections.abc import Iterable
from dataclasses import replace

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.rules import LAYER, TensorRule

HF_LAYER, NATIVE_LAYER = "model.layers.{i}.", "layers/{i}/"


def in_layers(layers: Iterable[int], rules: list[TensorRule]) -> list[TensorRule]:
    """Rules for these layers only: for models in which two kinds of mixers have weights of the same
    name.
    """

    def numbered(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        return tuple(name.replace(LAYER, str(layer)) for name in names)

    return [
        replace(rule, hf=numbered(rule.hf_names, layer), native=numbered(rule.native_names, layer))
        for layer in layers
        for rule in rules
    ]


def renamed_rules(
    rules: list[TensorRule], hf: tuple[str, str], native: tuple[str, str]
) -> list[TensorRule]:
    """With a part of the names on each side, (old, new), replaced."""

    def renamed(names: tuple[str, ...], parts: tuple[str, str]) -> tuple[str, ...]:
        return tuple(name.replace(*parts) for name in names)

    return [
        replace(rule, hf=renamed(rule.hf_names, hf), native=renamed(rule.native_names, native))
        for rule in rules
    ]


def multi_token_rules(
    layer: int, rules: list[TensorRule], prefix: str, outer: dict[str, str]
) -> list[TensorRule]:
    """Rules of a multi-token prediction layer, which has the weights of a layer of the model under
    a prefix, and others: native name -> HF name.
    """
    native = f"mtp/layers/{layer}/"
    return [
        TensorRule(f"{outer['projection']}.weight", f"{native}projection/weight", "e f -> f e"),
        *(
            TensorRule(f"{name}.weight", f"{native}{norm}/scale", "e -> e")
            for norm, name in outer.items()
            if norm != "projection"
        ),
        *renamed_rules(rules, (HF_LAYER, prefix), (NATIVE_LAYER, f"{native}block/")),
    ]


def outer_rules(prefix: str = "model.") -> list[TensorRule]:
    """Embedding, final norm and output head."""
    return [
        TensorRule(f"{prefix}embed_tokens.weight", "embedder/embedding", "v e -> v e"),
        TensorRule(f"{prefix}norm.weight", "final_norm/scale", "e -> e"),
        TensorRule("lm_head.weight", "head/weight", "v e -> e v"),
    ]


def norm_rules(names: dict[str, str], prefix: str = HF_LAYER) -> list[TensorRule]:
    """The norms of a layer, HF name -> native name."""
    return [
        TensorRule(f"{prefix}{hf_name}.weight", f"layers/{{i}}/{native_name}/scale", "e -> e")
        for hf_name, native_name in names.items()
    ]


PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}


def attention_rules(
    config: MaxTextConfig, prefix: str = f"{HF_LAYER}self_attn."
) -> list[TensorRule]:
    native = "layers/{i}/attention/"
    rules = [
        TensorRule(f"{prefix}o_proj.weight", f"{native}out/weight", "e (h d) -> h d e"),
        TensorRule(f"{prefix}o_proj.bias", f"{native}out/bias", "e -> e"),
        TensorRule(f"{prefix}q_norm.weight", f"{native}query_norm/scale", "d -> d"),
        TensorRule(f"{prefix}k_norm.weight", f"{native}key_norm/scale", "d -> d"),
        TensorRule(f"{prefix}sinks", f"{native}sinks", "h -> h"),
    ]
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        projection = f"{prefix}{letter}_proj"
        rules.append(
            TensorRule(f"{projection}.weight", f"{native}{name}/weight", "(h d) e -> e h d")
        )
        rules.append(TensorRule(f"{projection}.bias", f"{native}{name}/bias", "(h d) -> h d"))
    weights, biases = (
        tuple(f"{prefix}{letter}_proj.{part}" for letter in "qkv") for part in ("weight", "bias")
    )
    sizes = (config.num_query_heads // config.num_kv_heads, 1, 1)
    rules.append(
        TensorRule(weights, f"{native}qkv/weight", "(k g d) e -> e k g d", join="g", sizes=sizes)
    )
    rules.append(TensorRule(biases, f"{native}qkv/bias", "(k g d) -> k g d", join="g", sizes=sizes))
    return rules


def mlp_rules(hf: str = f"{HF_LAYER}mlp.", native: str = "layers/{i}/mlp/") -> list[TensorRule]:
    rules = []
    for name, branch in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")):
        rules.append(TensorRule(f"{hf}{name}.weight", f"{native}{branch}/weight", "o n -> n o"))
        rules.append(TensorRule(f"{hf}{name}.bias", f"{native}{branch}/bias", "o -> o"))
    weights, biases = (
        tuple(f"{hf}{name}.{part}" for name in ("gate_proj", "up_proj"))
        for part in ("weight", "bias")
    )
    rules.append(TensorRule(weights, f"{native}wi/weight", "(b m) e -> e b m", join="b"))
    rules.append(TensorRule(biases, f"{native}wi/bias", "(b m) -> b m", join="b"))
    return rules


def dense_rules(config: MaxTextConfig) -> list[TensorRule]:
    """A pre-norm model as Llama's."""
    return outer_rules() + norm_rules(PRE_NORMS) + attention_rules(config) + mlp_rules()


def expert_rules(
    hf: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    native: str = "layers/{i}/mlp/",
) -> list[TensorRule]:
    """One tensor an expert and projection, as checkpoints are published; or all experts in two
    tensors, as newer transformers classes save them.
    """
    published = [
        TensorRule(f"{hf}{{x}}.{name}.weight", f"{native}experts/{branch}/weight", "x o n -> x n o")
        for name, branch in zip(names, ("wi_0", "wi_1", "wo"), strict=True)
    ]
    return published + stacked_expert_rules(hf, native, "x (b m) e -> b x e m", "x e m -> x m e")


def stacked_expert_rules(hf: str, native: str, gate_up: str, down: str) -> list[TensorRule]:
    """All experts in two tensors, with these patterns."""
    return [
        TensorRule(f"{hf}gate_up_proj", f"{native}experts/wi_{{b}}/weight", gate_up),
        TensorRule(f"{hf}down_proj", f"{native}experts/wo/weight", down),
    ]
