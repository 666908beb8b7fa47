"""EAGLE-3 heads in Hugging Face folders, as their authors and vLLM's users publish them."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from maxtext.checkpoint.convert.conversion import applicable
from maxtext.checkpoint.safetensors_reader import HF_STEM, SafetensorsFolder
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.common.hub import find_folder
from maxtext.common.trees import flatten_dict, unflatten_dict
from maxtext.common.types import Json, Tree
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.layer_rules import (
    HF_LAYER,
    NATIVE_LAYER,
    attention_rules,
    mlp_rules,
    renamed_rules,
)
from maxtext.hf.rules import TensorRule
from maxtext.inference.engine.draft_heads import EagleProposer
from maxtext.layers.context import INFERENCE, BuildContext
from maxtext.layers.eagle import Eagle
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import LayerSpec
from maxtext.layers.weight_layout import pack_weights
from maxtext.models import hf_registry
from maxtext.models.configuration import load
from maxtext.models.registry import layers
from maxtext.models.transformer import build_context
from maxtext.sharding import AxisRules

ARCHITECTURE = "LlamaForCausalLMEagle3"
MIN_LAYERS = 4  # of a model whose residuals are read at the default places
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYER = "layers.0."  # the prefix of the layer, "midlayer." in older folders
NORMS = {
    "embedding_norm": f"{LAYER}input_layernorm",
    "hidden_norm": f"{LAYER}hidden_norm",
    "mlp_norm": f"{LAYER}post_attention_layernorm",
    "output_norm": "norm",
}


@dataclass(frozen=True)
class EagleFolder:
    path: Path
    entries: Json  # of config.json
    tensors: dict[str, np.ndarray]  # by their newer names

    @staticmethod
    def open(path: str, token: str | None) -> "EagleFolder":
        with as_config_error():
            folder = find_folder(path, token)
            entries = hf_registry.read_config(folder)
            architectures = entries.get("architectures")
            if not (isinstance(architectures, list) and ARCHITECTURE in architectures):
                raise ConfigError(
                    f"speculative_model_path={path} is no EAGLE-3 head: its config.json has "
                    f"architectures={architectures!r}, not {ARCHITECTURE}"
                )
            source = SafetensorsFolder.open(folder, HF_STEM)
            tensors = {
                name.replace("midlayer.", LAYER): source.read(name) for name in source.tensors
            }
        return EagleFolder(folder, entries, tensors)

    @property
    def floats(self) -> list[np.ndarray]:
        return [tensor for name, tensor in self.tensors.items() if name not in ("d2t", "t2d")]

    def settings(self) -> Layer:
        """Of a Llama with the layer alone."""
        entries = self.entries | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        if entries.get("num_hidden_layers", 1) != 1:
            raise ConfigError(
                f"{self.path}/config.json: num_hidden_layers={entries['num_hidden_layers']} is not "
                "supported: an EAGLE-3 head has one layer"
            )
        with as_config_error():
            return hf_registry.model_layer(entries, str(self.path / "config.json"))

    def taps(self, config: MaxTextConfig) -> tuple[int, ...]:
        """After how many layers of the model the residuals are that the head reads."""
        count = len(layers(config))
        options = self.entries.get("eagle_config") or {}
        stated = options.get(AUX_LAYERS) if isinstance(options, dict) else options
        if stated is None and count >= MIN_LAYERS:
            return 2, count // 2, count - 3
        if (
            not isinstance(stated, list)
            or not stated
            or not all(type(i) is int and 0 <= i <= count for i in stated)
        ):
            raise ConfigError(
                f"{self.path} does not fit a model of {count} layers: its head reads the residuals "
                f"after {stated or 'layers 2, n / 2 and n - 3'}"
            )
        return tuple(stated)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            present = "no such tensor" if tensor is None else f"one of shape {list(tensor.shape)}"
            raise ConfigError(
                f"{self.path} is no head for this model, which needs {name} of shape "
                f"{list(shape)}: it has {present}"
            )
        return tensor

    def token_ids(self, draft_vocab_size: int, vocab_size: int) -> np.ndarray:
        """The tokens that the head's outputs stand for."""
        outputs = np.arange(draft_vocab_size)
        if "d2t" not in self.tensors and draft_vocab_size == vocab_size:
            return outputs
        token_ids = outputs + self.read("d2t", (draft_vocab_size,))
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise ConfigError(f"{self.path} drafts tokens that the model does not have")
        return token_ids


def load_eagle_head(config: MaxTextConfig, rules: AxisRules, shared: Layer) -> EagleProposer:
    """The proposer of the head at speculative_model_path; `shared` are the settings that it has
    from the model. Raises ConfigError if it does not fit the model."""
    folder = EagleFolder.open(config.speculative_model_path, config.hf_access_token)
    bfloat16 = {}
    if {str(tensor.dtype) for tensor in folder.floats} == {"bfloat16"}:
        bfloat16 = {"weight_dtype": Setting("bfloat16", Source("derived", "the head"))}
    head_config = load(None, bfloat16 | shared, model=folder.settings())
    [spec] = layers(head_config)
    assert isinstance(spec, LayerSpec)
    vocab_size, dim, taps = config.vocab_size, spec.embed_dim, folder.taps(config)
    if head_config.vocab_size != vocab_size:
        raise ConfigError(
            f"speculative_model_path={config.speculative_model_path} has "
            f"vocab_size={head_config.vocab_size} and the model {vocab_size}: choose a head that "
            "was trained for this model"
        )
    draft_vocab_size = folder.entries.get("draft_vocab_size") or vocab_size
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= vocab_size:
        raise ConfigError(
            f"{folder.path}/config.json: draft_vocab_size={draft_vocab_size!r} must be a whole "
            f"number from 1 to vocab_size={vocab_size}"
        )
    tapped_dim = len(taps) * config.emb_dim
    dtype = head_config.dtype.value

    def template_of(context: BuildContext) -> Template:
        initializer = Initializer(None, head_config.weight_dtype.value, context=context)
        return Template.of(lambda: Eagle(initializer, spec, tapped_dim, draft_vocab_size, dtype))

    unpacked = template_of(build_context(head_config, mode=INFERENCE))
    weights = jax.device_put(head_weights(folder, unpacked, head_config), rules.replicated())
    template = template_of(build_context(head_config, rules, mode=INFERENCE))
    weights = {
        "head": pack_weights(template, weights),
        "token_ids": jax.device_put(
            folder.token_ids(draft_vocab_size, vocab_size).astype(np.int32), rules.replicated()
        ),
    }
    if "embed_tokens.weight" in folder.tensors:
        embedding = folder.read("embed_tokens.weight", (vocab_size, dim)).astype(dtype)
        weights["embedding"] = jax.device_put(embedding, rules.replicated())
    elif dim != config.emb_dim:
        raise ConfigError(
            f"{folder.path} is no head for this model: it has hidden_size={dim} and no embedding, "
            f"and the model's has {config.emb_dim}"
        )
    return EagleProposer(
        config.num_speculative_tokens,
        template=template,
        attention=spec.attention,
        layer_outputs=taps,
        vocab_size=vocab_size,
        weights=weights,
    )


def head_weights(folder: EagleFolder, template: Template, config: MaxTextConfig) -> Tree:
    """The tensors of a folder as the weights of `Eagle`; `config` is that of its layer."""
    leaves = {
        "/".join(map(str, path)): leaf for path, leaf in flatten_dict(template.weights).items()
    }
    weights = {}
    for rule in applicable(tensor_rules(config), {name: x.shape for name, x in leaves.items()}):
        tensors = map(folder.read, rule.hf_names, rule.hf_shapes)
        for name, weight in zip(rule.native_names, rule.to_native(tensors), strict=True):
            weights[tuple(name.split("/"))] = weight.astype(leaves[name].dtype)
    return unflatten_dict(weights)


def tensor_rules(config: MaxTextConfig) -> list[TensorRule]:
    return [
        TensorRule("fc.weight", "fuse/weight", "e f -> f e"),
        TensorRule("lm_head.weight", "head/weight", "v e -> e v"),
        *(TensorRule(f"{hf}.weight", f"{norm}/scale", "e -> e") for norm, hf in NORMS.items()),
        *renamed_rules(
            [*attention_rules(config), *mlp_rules()], (HF_LAYER, LAYER), (NATIVE_LAYER, "")
        ),
    ]
