"""The configuration of a model for inference, and its weights."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxtext.adapters.merge import MergedTensors, merged_config
from maxtext.adapters.peft import adapter_folders
from maxtext.adapters.peft_folder import read_adapter
from maxtext.adapters.spec import Adapter
from maxtext.checkpoint.open import Checkpoint, model_param_infos
from maxtext.checkpoint.quantized import load_model, quantized_weight_dtype
from maxtext.checkpoint.tensors import Progress, TensorSource
from maxtext.checkpoint.weights import ModelWeights, ParamInfo
from maxtext.common.errors import ConfigError
from maxtext.common.files import read_json_object
from maxtext.common.hub import find_folder, model_name
from maxtext.common.types import Tree
from maxtext.configs import provenance
from maxtext.configs.load import peek_setting
from maxtext.configs.merge import axis_rules
from maxtext.configs.provenance import Layer, Setting
from maxtext.configs.types import (
    AdamW,
    Distillation,
    MaxTextConfig,
    Muon,
    Optimizer,
    Preferences,
)
from maxtext.kernels.weight_only import MXFP4
from maxtext.layers.context import INFERENCE, BuildContext
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import abstract_quantized, initial_quantizer
from maxtext.models.configuration import load
from maxtext.models.transformer import build_context, initial_weights, make_template
from maxtext.sharding import AxisRules
from maxtext.tokenizers import Tokenizer

MTP_PROJECTIONS = (".eh_proj.weight", "mtp.fc.weight")  # a tensor that each such layer has
CACHE_LENGTH = "cache_sequence"  # the logical axis of the length of a KV cache
TRAINING_KEYS = frozenset[str]().union(
    *(group.model_fields for group in (Optimizer, AdamW, Muon, Preferences, Distillation))
)
# PEFT folders, which have the names of their folders, or by name
Folders = Sequence[str | os.PathLike] | Mapping[str, str | os.PathLike] | None


def resolve_config(
    overrides: Layer, checkpoint: Checkpoint | None = None, path: str | None = None
) -> MaxTextConfig:
    """The configuration of a checkpoint's model, or of the model that `model_name` names, for
    inference: the YAML file at `path`, the environment and `overrides`.

    Keys that these leave open have other defaults than in training: layers are unrolled, long
    prompts are prefilled in chunks, paged caches have as many blocks as memory allows, sequences
    are as long as the learned positions, and weights that are bfloat16 in the checkpoint stay so.
    The tokenizer is that of the checkpoint's folder, if it has one.

    Raises ConfigError if `overrides` set a key that acts only in training. A file may set them.
    """
    for key in overrides:
        if key in TRAINING_KEYS:
            raise ConfigError(f"{key} is for training and would do nothing here: leave it out")

    def derived(key: str, value: object, origin: str) -> Layer:
        if peek_setting(key, path, overrides, os.environ) is not None:
            return {}
        return {key: Setting(value, provenance.Source("derived", origin))}

    defaults = derived("scan_layers", False, "inference")
    overrides = overrides | cache_length_rules(overrides, path)
    defaults |= derived("use_chunked_prefill", True, "inference")
    defaults |= derived("pagedattn_num_pages", 0, "inference")
    if checkpoint is None:
        return load(path, defaults | overrides)
    if (positions := checkpoint.settings.get("trainable_position_size")) is not None:
        defaults |= derived("max_target_length", positions.value, "learned positions")
    method = peek_setting("speculative_method", path, overrides, os.environ)
    if method == "mtp" and (count := num_mtp_layers(checkpoint)):
        defaults |= derived("mtp_num_layers", count, "the checkpoint")
    bfloat16 = derived("weight_dtype", "bfloat16", "the checkpoint")
    if tensor_dtypes(checkpoint) == {"bfloat16"}:
        defaults |= bfloat16
    config = load(path, defaults | overrides, model=checkpoint.model_layer)
    if bfloat16.keys() - defaults.keys() and has_bfloat16_weights(checkpoint, config):
        config = load(path, defaults | bfloat16 | overrides, model=checkpoint.model_layer)
    return config


def num_mtp_layers(checkpoint: Checkpoint) -> int:
    """The multi-token prediction layers in a Hugging Face folder."""
    if checkpoint.mapping is None:
        return 0
    return sum(name.endswith(MTP_PROJECTIONS) for name in checkpoint.hf_tensor_names)


def tensor_dtypes(checkpoint: Checkpoint) -> set[str]:
    return {np.dtype(tensor.dtype).name for tensor in checkpoint.source.tensors.values()}


def has_bfloat16_weights(checkpoint: Checkpoint, config: MaxTextConfig) -> bool:
    """Whether all weights of a checkpoint are bfloat16, except those whose dtype no key sets.
    `config`: that of its model."""
    dtypes = tensor_dtypes(checkpoint)
    if dtypes != {"bfloat16", "float32"}:
        return dtypes == {"bfloat16"}
    param_infos = model_param_infos(make_template(config), config)
    return is_bfloat16(checkpoint.weights(config, param_infos), param_infos)


def refuse_dropped_tokens(config: MaxTextConfig) -> None:
    if config.capacity_factor > 0:
        raise ConfigError(
            f"capacity_factor={config.capacity_factor:g} lets experts drop tokens, so that a "
            "completion would depend on the other requests of its batch: leave it out, or set -1"
        )


def inference_context(config: MaxTextConfig, rules: AxisRules) -> BuildContext:
    """Its `quantized_weights` are those of all matmuls: only experts are in mxfp4."""
    dtype = quantized_weight_dtype(config)
    quantized = dtype if dtype not in (None, MXFP4) else ""
    return build_context(config, rules, mode=INFERENCE, quantized_weights=quantized)


def is_bfloat16(source: TensorSource, param_infos: Mapping[str, ParamInfo]) -> bool:
    """Whether all weights are bfloat16, except those whose dtype no key sets."""
    dtypes = {
        tensor.dtype.name
        for name, tensor in source.tensors.items()
        if not param_infos[name].fixed_dtype
    }
    return dtypes == {"bfloat16"}


def random_weights(config: MaxTextConfig, template: Template, rules: AxisRules) -> Tree:
    """The initial weights of a model, quantized as the keys say."""
    if config.checkpoint_is_quantized:
        raise ConfigError(
            "checkpoint_is_quantized=true, but a model by its name has no checkpoint: "
            "leave the key out"
        )
    dtype = quantized_weight_dtype(config)
    shardings = rules.shardings(*abstract_quantized(template, dtype))
    quantize = initial_quantizer(dtype)
    if rules.mesh.size == 1:
        # One program for all weights would need memory for those of most layers twice.
        with jax.default_device(rules.mesh.devices.item()):
            return jax.device_put(initial_weights(config, quantize=quantize), shardings)
    return jax.jit(
        lambda: initial_weights(config, loop=True, quantize=quantize), out_shardings=shardings
    )()


def load_weights(
    config: MaxTextConfig,
    template: Template,
    rules: AxisRules,
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> tuple[Tree, dict[str, np.dtype]]:
    """The weights of a checkpoint, and the dtypes that they have on disk."""
    param_infos = model_param_infos(template, config)
    source = checkpoint.weights(config, param_infos)
    weights = load_model(source, config, param_infos, template, rules, progress)
    return weights, {name: tensor.dtype for name, tensor in source.tensors.items()}


def read_adapters(config: MaxTextConfig, folders: Folders) -> dict[str, Adapter]:
    """The adapters of PEFT folders, or of `org/name` of the Hugging Face Hub, by name; by default
    those at lora_input_adapters_path.
    """
    token = config.hf_access_token
    if folders is None:
        path = config.lora_input_adapters_path
        folders = adapter_folders(path, token) if path else {}
    if not isinstance(folders, Mapping):
        names = [model_name(os.fspath(folder)) for folder in folders]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two adapters are called {twice}: name them in a dict")
        folders = dict(zip(names, folders, strict=True))
    return {
        name: read_adapter(find_folder(folder, token), config) for name, folder in folders.items()
    }


def merge_model(
    base: ModelWeights, adapter: Adapter, config: MaxTextConfig, rules: AxisRules
) -> tuple[MaxTextConfig, Template, Tree]:
    """The configuration, the template and new weights of a model with an adapter merged into
    them."""
    merged = MergedTensors(base, adapter, config)
    config = merged_config(config, adapter)
    template = make_template(config)
    param_infos = model_param_infos(template, config)
    return config, template, load_model(merged, config, param_infos, template, rules)


def find_eos_ids(hf_assets: Iterable[Path], tokenizer: Tokenizer | None) -> list[int]:
    """The end-of-sequence ids of generation_config.json, of config.json, or of the tokenizer."""
    files = {file.name: file for file in hf_assets}
    for name in ("generation_config.json", "config.json"):
        if name in files:
            eos_ids = read_json_object(files[name]).get("eos_token_id")
            if eos_ids not in (None, -1):
                return [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        return [tokenizer.eos_id]
    return []


def cache_length_rules(overrides: Layer, path: str | None) -> Layer:
    """logical_axis_rules that split caches by their length over the context_autoregressive axis, if
    it has several devices and no rule of the user splits them."""
    sizes = [
        peek_setting(f"{network}_context_autoregressive_parallelism", path, overrides, os.environ)
        for network in ("ici", "dcn")
    ]
    if all(size in (None, 1) for size in sizes):
        return {}
    key = "logical_axis_rules"
    source = provenance.Source("derived", "inference")
    outer = Setting(peek_setting(key, path, {}, os.environ) or [], source)
    rules = axis_rules(overrides.get(key, Setting([], source)))
    if any(name == CACHE_LENGTH for name, _ in [*axis_rules(outer), *rules]):
        return {}
    return {key: Setting([*rules, [CACHE_LENGTH, ["context_autoregressive"]]], source)}
