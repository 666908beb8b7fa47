"""What a family's table is, and the parts that most tables share."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from maxtext.checkpoint.convert.rules import LAYER, Rule
from maxtext.common.errors import UserError
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.rope import RopeSpec
from maxtext.models.registry import layers

Json = dict[str, Any]


@dataclass
class Reading:
    """What a config.json says: keys of ours, and facts that no key names."""

    keys: Json
    facts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    architectures: tuple[
        str, ...
    ]  # the first is written; those after it hold the same text model, or the same tensors
    model_type: str
    block: str  # decoder_block
    read: Callable[[Json], Reading]  # of a config.json with the defaults of its class
    write: Callable[[Any], Json]  # of a configuration, without architectures, model_type and dtype
    rules: Callable[[Any], list[Rule]]
    suits: Callable[[Any], bool] = lambda config: True  # among the tables of one decoder_block
    ignored: tuple[str, ...] = ()  # tensors that transformers leaves out as well
    ignored_in: Callable[[Any], tuple[str, ...]] = (
        lambda config: ()
    )  # likewise, where the configuration says which


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
}


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(
            f"config.json: the activation {name!r} is not supported: use one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def their_activation(config: MaxTextConfig) -> str:
    for theirs, ours in ACTIVATIONS.items():
        if ours == config.mlp_activations[0]:
            return theirs
    known = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
    raise UserError(
        f"mlp_activations={config.mlp_activations} has no name in a Hugging Face config.json; these have: {known}"
    )


def need(hf: Json, **values: Any) -> None:
    """Refuse a config.json that asks for what we do not compute; an absent or null entry is as the
    value given.
    """
    for name, value in values.items():
        if hf.get(name) not in (value, None):
            raise UserError(f"config.json: {name}={hf[name]!r} is not supported, only {value!r}")


def kinds(hf: Json, default: Callable[[int], str] | None = None) -> list[str] | None:
    """The layers' kinds, as listed or by the rule of the family."""
    listed = hf.get("layer_types")
    if listed is None:
        return [default(i) for i in range(hf["num_hidden_layers"])] if default else None
    unknown = sorted(set(listed) - set(KINDS))
    if unknown:
        raise UserError(
            f"config.json: layer_types has {', '.join(unknown)}: supported are {', '.join(KINDS)}"
        )
    return [KINDS[name] for name in listed]


def dense_keys(hf: Json, block: str) -> Json:
    """Keys that nearly all families state alike."""
    hf = {name: value for name, value in hf.items() if value is not None}
    heads = hf["num_attention_heads"]
    return {
        "decoder_block": block,
        "base_emb_dim": hf["hidden_size"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": hf.get("num_key_value_heads", heads),
        "head_dim": hf.get("head_dim", hf["hidden_size"] // heads),
        "base_mlp_dim": hf["intermediate_size"],
        "base_num_decoder_layers": hf["num_hidden_layers"],
        "vocab_size": hf["vocab_size"],
        "mlp_activations": [
            activation(hf.get("hidden_act") or hf.get("hidden_activation") or "silu"),
            "linear",
        ],
        "normalization_layer_epsilon": hf["rms_norm_eps"],
        "logits_via_embedding": hf.get("tie_word_embeddings", False),
        "normalize_embedding_logits": False,
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        "max_position_embeddings": hf["max_position_embeddings"],
        "enable_dropout": False,
    }


def dense_config(config: MaxTextConfig, hidden_act: str | None = None) -> Json:
    """The entries of config.json that nearly all families state alike; `hidden_act` where it is not
    the key's.
    """
    count = len(layers(config))
    return {
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": count,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": hidden_act or their_activation(config),
        "rms_norm_eps": config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
    }


def rope_parameters(hf: Json) -> Json:
    """Their rotary parameters in the newer form, of one kind of layer or by kind."""
    if hf.get("rope_parameters"):
        return hf["rope_parameters"]
    scaling = dict(hf.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return scaling | {"rope_theta": hf.get("rope_theta", 10_000.0)}


def rope_fields(
    hf: Json, parameters: Json, fraction: float = 1.0, interleave: bool = False
) -> Json:
    """The fields of a RopeSpec that compute what transformers does with these parameters."""
    kind = parameters.get("rope_type", "default")
    kind = (
        "default" if kind == "mrope" else kind
    )  # the three positions of a text token are the same
    theta = parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    fields: Json = {
        "max_timescale": float(theta),
        "fraction": float(
            parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or fraction
        ),
        "interleave": interleave,
    }
    original = parameters.get("original_max_position_embeddings") or hf.get(
        "max_position_embeddings"
    )
    if kind == "linear":
        fields["linear_factor"] = float(parameters["factor"])
    elif kind == "proportional":
        fields |= {"proportional": True, "linear_factor": float(parameters.get("factor", 1.0))}
    elif kind == "llama3":
        fields |= {
            "kind": "llama3.1",
            "factor": float(parameters["factor"]),
            "original_length": original,
        }
        fields["low_frequency_factor"] = float(parameters["low_freq_factor"])
        fields["high_frequency_factor"] = float(parameters["high_freq_factor"])
    elif kind == "yarn":
        factor = float(parameters.get("factor") or hf["max_position_embeddings"] / original)
        fields |= {"kind": "yarn", "factor": factor, "original_length": original}
        fields["beta_fast"] = float(parameters.get("beta_fast") or 32)
        fields["beta_slow"] = float(parameters.get("beta_slow") or 1)
        fields["truncate"] = bool(parameters.get("truncate", True))
        fields["attention_factor"] = yarn_magnitude(parameters, factor)
    elif kind != "default":
        raise UserError(
            f"config.json: rope_type={kind!r} is not supported: default, linear, llama3, yarn and proportional are"
        )
    return fields


def yarn_magnitude(parameters: Json, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    scale, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and whole:
        return yarn_temperature(factor, scale) / yarn_temperature(factor, whole)
    return yarn_temperature(factor)


def yarn_temperature(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_keys(fields: Json) -> Json:
    """The keys that say the same, as far as their types can."""
    keys: Json = {
        "rope_type": fields.get("kind", "default"),
        "partial_rotary_factor": fields["fraction"],
    }
    if fields["max_timescale"].is_integer():
        keys["rope_max_timescale"] = int(fields["max_timescale"])
    if fields.get("linear_factor", 1.0) != 1.0:
        keys["rope_linear_scaling_factor"] = fields["linear_factor"]
    if fields.get("kind") in ("llama3.1", "yarn"):
        keys["original_max_position_embeddings"] = int(fields["original_length"])
        if fields["factor"].is_integer():
            keys["rope_factor"] = int(fields["factor"])
    return keys


def their_rope(spec: RopeSpec | None) -> Json:
    """Their rotary parameters of a RopeSpec."""
    if spec is None:
        raise UserError(
            "a model without rotary positions has no place in a Hugging Face config.json of this family"
        )
    if spec.min_timescale != 1:
        raise UserError(
            "rope_min_timescale other than 1 has no place in a Hugging Face config.json"
        )
    parameters: Json = {"rope_type": "default", "rope_theta": float(spec.max_timescale)}
    if spec.proportional:
        parameters |= {"rope_type": "proportional", "factor": spec.linear_factor}
    elif spec.linear_factor != 1:
        parameters |= {"rope_type": "linear", "factor": spec.linear_factor}
    if spec.fraction != 1 or spec.proportional:
        parameters["partial_rotary_factor"] = spec.fraction
    if spec.kind in ("llama3.1", "yarn"):
        parameters |= {
            "factor": float(spec.factor),
            "original_max_position_embeddings": spec.original_length,
        }
    if spec.kind == "llama3.1":
        parameters |= {"rope_type": "llama3", "low_freq_factor": spec.low_frequency_factor}
        parameters["high_freq_factor"] = spec.high_frequency_factor
    if spec.kind == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "beta_fast": spec.beta_fast,
            "beta_slow": spec.beta_slow,
        }
        parameters |= {"truncate": spec.truncate, "attention_factor": spec.magnitude}
    return parameters


def one_rope(hf: Json, **options: Any) -> Reading:
    """Keys and facts of a model whose layers all turn alike."""
    fields = rope_fields(hf, rope_parameters(hf), **options)
    return Reading(rope_keys(fields), {"rope": {"all": fields}})


def their_kinds(config: MaxTextConfig) -> list[str]:
    """layer_types of a model whose layers attend."""
    names = []
    for layer in layers(config):
        seen = getattr(layer.attention, "mask", None)
        kind = (
            "linear"
            if seen is None
            else "sliding"
            if seen.window
            else "chunk"
            if seen.chunk
            else "full"
        )
        names.append(next(theirs for theirs, ours in KINDS.items() if ours == kind))
    return names


# Rules that many families share. Those whose weights a model lacks are passed over.


def in_layers(numbers: Iterable[int], rules: list[Rule]) -> list[Rule]:
    """Rules for these layers alone: where mixers of two kinds have weights of one name."""

    def numbered(names: str | tuple[str, ...], number: int) -> str | tuple[str, ...]:
        if isinstance(names, str):
            return names.replace(LAYER, str(number))
        return tuple(name.replace(LAYER, str(number)) for name in names)

    return [
        replace(rule, theirs=numbered(rule.theirs, number), ours=numbered(rule.ours, number))
        for number in numbers
        for rule in rules
    ]


def outer_rules(prefix: str = "model.") -> list[Rule]:
    return [
        Rule(f"{prefix}embed_tokens.weight", "embedder/embedding", "v e -> v e"),
        Rule(f"{prefix}norm.weight", "final_norm/scale", "e -> e"),
        Rule("lm_head.weight", "head/kernel", "v e -> e v"),
    ]


def norm_rules(names: dict[str, str], prefix: str = "model.layers.{i}.") -> list[Rule]:
    """Norms of a layer, their names -> ours."""
    return [
        Rule(f"{prefix}{theirs}.weight", f"layers/{{i}}/{ours}/scale", "e -> e")
        for theirs, ours in names.items()
    ]


PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
SANDWICH_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}


def attention_rules(
    config: MaxTextConfig, prefix: str = "model.layers.{i}.self_attn."
) -> list[Rule]:
    ours = "layers/{i}/attention/"
    rules = [
        Rule(f"{prefix}o_proj.weight", f"{ours}out/kernel", "e (h d) -> h d e"),
        Rule(f"{prefix}o_proj.bias", f"{ours}out/bias", "e -> e"),
        Rule(f"{prefix}q_norm.weight", f"{ours}query_norm/scale", "d -> d"),
        Rule(f"{prefix}k_norm.weight", f"{ours}key_norm/scale", "d -> d"),
        Rule(f"{prefix}sinks", f"{ours}sinks", "h -> h"),
    ]
    for theirs, name in (("q", "query"), ("k", "key"), ("v", "value")):
        rules.append(
            Rule(f"{prefix}{theirs}_proj.weight", f"{ours}{name}/kernel", "(h d) e -> e h d")
        )
        rules.append(Rule(f"{prefix}{theirs}_proj.bias", f"{ours}{name}/bias", "(h d) -> h d"))
    split = tuple(f"{prefix}{theirs}_proj" for theirs in "qkv")
    sizes = (config.num_query_heads // config.num_kv_heads, 1, 1)
    weights, biases = (tuple(f"{name}.{part}" for name in split) for part in ("weight", "bias"))
    rules.append(Rule(weights, f"{ours}qkv/kernel", "(k g d) e -> e k g d", join="g", sizes=sizes))
    rules.append(Rule(biases, f"{ours}qkv/bias", "(k g d) -> k g d", join="g", sizes=sizes))
    return rules


def mlp_rules(theirs: str = "model.layers.{i}.mlp.", ours: str = "layers/{i}/mlp/") -> list[Rule]:
    rules = []
    for name, branch in (("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo")):
        rules.append(Rule(f"{theirs}{name}.weight", f"{ours}{branch}/kernel", "o n -> n o"))
        rules.append(Rule(f"{theirs}{name}.bias", f"{ours}{branch}/bias", "o -> o"))
    pair = (f"{theirs}gate_proj", f"{theirs}up_proj")
    weights, biases = (tuple(f"{name}.{part}" for name in pair) for part in ("weight", "bias"))
    rules.append(Rule(weights, f"{ours}wi/kernel", "(b m) e -> e b m", join="b"))
    rules.append(Rule(biases, f"{ours}wi/bias", "(b m) -> b m", join="b"))
    return rules


def expert_rules(
    theirs: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ours: str = "layers/{i}/mlp/",
) -> list[Rule]:
    """One tensor an expert and branch, as checkpoints are published; or all experts in two, as
    newer classes save.
    """
    each = [
        Rule(f"{theirs}{{x}}.{name}.weight", f"{ours}experts/{branch}/kernel", "x o n -> x n o")
        for name, branch in zip(names, ("wi_0", "wi_1", "wo"), strict=True)
    ]
    return each + packed_expert_rules(theirs, ours, "x (b m) e -> b x e m", "x e m -> x m e")


def packed_expert_rules(theirs: str, ours: str, into: str, out: str) -> list[Rule]:
    return [
        Rule(f"{theirs}gate_up_proj", f"{ours}experts/wi_{{b}}/kernel", into),
        Rule(f"{theirs}down_proj", f"{ours}experts/wo/kernel", out),
    ]
