"""Checkpoints of a model, whoever wrote them: what they say of the model, and its weights by our
names.

Three kinds of folders are opened alike: Hugging Face's (config.json, model.safetensors …), ours
(config.yml, weights.safetensors …, and in hugging_face/ the files that came with the model), and
checkpoints of training, of which the newest step counts. The first two can be written again as the
other.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint import steps
from maxtext.checkpoint.convert.conversion import from_hf, to_hf
from maxtext.checkpoint.convert.dequantize import Dequantized
from maxtext.checkpoint.former_names import match_names
from maxtext.checkpoint.manager import MODEL_FILE
from maxtext.checkpoint.quantized import INTEGERS, SCALE, QuantizedFolder, quantized_weight_dtype
from maxtext.checkpoint.safetensors_reader import (
    HF_STEM,
    NATIVE_STEM,
    SafetensorsFolder,
    find_hf_assets,
)
from maxtext.checkpoint.safetensors_writer import write_hf_folder, write_native_folder
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.tensors import DTYPES, Progress, RenamedTensors, TensorStream
from maxtext.checkpoint.training_weights import TrainingWeights
from maxtext.checkpoint.weights import ParamInfo, find_param_infos
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.common.log import LOGGER
from maxtext.configs import rules, text, types
from maxtext.configs.load import base_values
from maxtext.configs.problems import ProblemKind
from maxtext.configs.provenance import Layer, Source
from maxtext.configs.sources import read_yaml
from maxtext.configs.types import MaxTextConfig
from maxtext.hf import schema
from maxtext.hf.config_json import HfMapping
from maxtext.hf.quantized import quantized_format
from maxtext.layers.parameters import Template
from maxtext.models import hf_registry
from maxtext.models.registry import segments

HF_ASSETS_DIR, NAMES = "hugging_face", "tensor_names.json"
DTYPE_WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
# What a model is, apart from how it is run.
MODEL_GROUPS = (
    types.ModelArchitecture, types.MTP, types.Logits, types.Attention, types.MoBa, types.MlaAttention,
    types.AttentionIndexer, types.Llama4Attention, types.MoEGeneral, types.DeepSeekMoE, types.Qwen3Next,
    types.PositionalEmbedding, types.Rope, types.YarnRope, types.ManifoldConstrainedHyperConnections, types.Engram,
)  # fmt: skip
MODEL_KEYS = (
    "vocab_size",
    *(key for group in MODEL_GROUPS for key in group.model_fields if key != "attention"),
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder."""

    path: Path
    source: TensorStream  # its tensors, dequantized
    settings: Layer  # what it says of the model, as a model's file would
    hf_assets: tuple[Path, ...]  # configuration and tokenizer files in Hugging Face's form
    hf_tensor_names: frozenset[str]  # as in the Hugging Face folder, where they are known
    mapping: HfMapping | None = None  # of a Hugging Face folder

    def weights(
        self,
        config: MaxTextConfig,
        param_infos: Mapping[str, ParamInfo],
        dtype: np.dtype | None = None,
    ) -> Any:
        """Its tensors as the weights of a native model."""
        if self.mapping is None:
            return under_current_names(self.source, param_infos)
        renamed = hf_registry.canonical_names(self.source.tensors, self.mapping)
        source = RenamedTensors(self.source, renamed)
        weights = from_hf(
            source,
            hf_registry.rules(self.mapping, config),
            param_infos,
            hf_registry.ignored_tensors(self.mapping, config),
            dtype,
        )
        left_out = set(renamed).difference(*(step.hf_names for step in weights.steps))
        if left_out:
            LOGGER.info(
                "%s: %d tensors are no part of the model: %s …",
                self.path,
                len(left_out),
                min(left_out),
            )
        return weights


def under_current_names(source: TensorStream, param_infos: Mapping[str, ParamInfo]) -> TensorStream:
    """A source of native weights under the names that the model gives them now."""
    quantized = source if isinstance(source, QuantizedFolder) else None
    stored = source.tensors if quantized is None else quantized.folder.tensors
    names = match_names(stored, {name + suffix for name in param_infos for suffix in ("", SCALE)})
    if all(name == stored_name for name, stored_name in names.items()):
        return source
    if quantized is not None:
        return QuantizedFolder(RenamedTensors(quantized.folder, names), quantized.dtype)
    return RenamedTensors(source, names)


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    path = local_path(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if any((path / f"{NATIVE_STEM}.safetensors{end}").exists() for end in ("", ".index.json")):
        return open_ours(path)
    if steps.is_checkpoints(path):
        return open_training(steps.steps_under(path.absolute())[-1])
    hf_config = hf_registry.read_config(path)
    config_path = str(path / "config.json")
    settings = hf_registry.model_layer(hf_config, config_path)
    mapping = hf_registry.mapping_of(hf_config, config_path)
    weights_format = quantized_format(hf_config, config_path)
    hf_registry.check_model(settings, config_path)
    check_assets(find_hf_assets(path))
    folder: TensorStream = SafetensorsFolder.open(path, HF_STEM)
    if weights_format is not None:
        folder = Dequantized.of(folder, weights_format)
    names = frozenset(hf_registry.canonical_names(folder.tensors, mapping))
    return Checkpoint(path, folder, settings, tuple(find_hf_assets(path)), names, mapping)


def check_assets(files: Iterable[Path]) -> None:
    """Raise ConfigError for a file beside the weights that will be read later and is damaged."""
    for file in files:
        if file.name == "generation_config.json":
            schema.check_generation_config(file)


def open_ours(path: Path) -> Checkpoint:
    if not (path / "config.yml").is_file():
        raise UserError(f"{path} has weights but no config.yml, which says what model they are of")
    settings = read_yaml(path / "config.yml", "model")
    settings.pop("base_config", None)
    hf_assets = (
        tuple(find_hf_assets(path / HF_ASSETS_DIR)) if (path / HF_ASSETS_DIR).is_dir() else ()
    )
    check_assets(hf_assets)
    names: frozenset[str] = frozenset()
    for file in hf_assets:
        if file.name == "config.json":
            hf_registry.read_config(file.parent)
        if file.name == NAMES:
            names = read_names(file)
    opened = SafetensorsFolder.open(path, NATIVE_STEM)
    folder: TensorStream = opened
    if "checkpoint_is_quantized" in settings:
        folder = QuantizedFolder.of(opened, stated_dtype(settings, path))
    return Checkpoint(path, folder, settings, hf_assets, names)


def read_names(file: Path) -> frozenset[str]:
    """The names of the tensors that native weights were converted from."""
    try:
        names = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{file} must hold a JSON list of names")
    return frozenset(names)


def stated_dtype(settings: Layer, path: Path) -> str:
    """Of the kernels in a folder with quantized weights."""
    stated = settings["quantization"].value if "quantization" in settings else None
    if stated not in INTEGERS:
        raise UserError(
            f"{path / 'config.yml'} must say quantization: {' or '.join(INTEGERS)}, not {stated}"
        )
    return stated


def open_training(step: Path) -> Checkpoint:
    settings = read_yaml(step / steps.RUN / MODEL_FILE, "model")
    settings.pop("base_config", None)
    return Checkpoint(step, TrainingWeights(SavedStep(step), settings), settings, (), frozenset())


def with_max_positions(settings: Layer, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys, with as long a sequence as the model has learned positions for, unless they say how
    long.
    """
    learned = settings.get("trainable_position_size")
    return (
        keys
        if learned is None or "max_target_length" in keys
        else keys | {"max_target_length": learned.value}
    )


def dtype_of(word: str | None) -> np.dtype | None:
    return None if word is None else DTYPES[DTYPE_WORDS[word]]


def model_text(config: MaxTextConfig) -> str:
    """A config.yml that says what model a configuration describes, and nothing of how to run it."""
    base = base_values()
    changed = [
        key
        for key in text.KEYS_IN_ORDER
        if key in MODEL_KEYS and getattr(config, key) != getattr(base, key)
    ]
    # Loading the file refuses keys that have no effect, so they are not written.
    as_file = config.attributed_to(Source("file", "config.yml"))
    inert = {
        problem.key
        for problem in rules.check_settings(as_file)
        if problem.kind is ProblemKind.INERT
    }
    return "base_config: base.yml\n" + text.yaml_text(
        config, (key for key in changed if key not in inert)
    )


def save_native(
    out: str | os.PathLike,
    config: MaxTextConfig,
    weights: TensorStream,
    hf_assets: tuple[Path, ...] = (),
    names: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    shard_bytes: int = 2 * 10**9,
) -> None:
    """A folder of our weights, of which config.yml says whether they are quantized. `names`: of the
    tensors that they were read from, to be written so again."""
    files = [file for file in hf_assets if file.name != NAMES]
    about = model_text(config)
    if dtype := quantized_weight_dtype(config):
        about += f"quantization: {dtype}\ncheckpoint_is_quantized: true\n"
    texts = {"config.yml": about}
    if names:
        texts[f"{HF_ASSETS_DIR}/{NAMES}"] = json.dumps(sorted(names))
    write_native_folder(out, weights, texts, files, shard_bytes, progress)


def save_hf_folder(
    out: str | os.PathLike,
    config: MaxTextConfig,
    param_infos: Mapping[str, ParamInfo],
    weights: TensorStream,
    hf_assets: tuple[Path, ...] = (),
    names: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    shard_bytes: int = 5 * 10**9,
    text_only: bool = False,
) -> None:
    """A Hugging Face folder. Its config.json is the one carried along if there is one, for it may
    say more than we know; what it says of the tensors is brought up to date. Raises ConfigError if
    the weights came from a folder with vision or audio tensors, unless text_only=True says that
    these may be lost."""
    if not text_only:
        hf_registry.refuse_multimodal(names)
    rules = hf_registry.rules(hf_registry.mapping_for(config), config)
    tensors = to_hf(weights, rules, param_infos, names)
    floats = [tensor for tensor in tensors.tensors.values() if tensor.nbytes]
    widest = max(floats, key=lambda tensor: tensor.nbytes).dtype.name
    hf = renewed(hf_assets, config, widest) or hf_registry.hf_config(config, widest)
    texts = {"config.json": json.dumps(hf, indent=2)}
    files = [file for file in hf_assets if file.name != NAMES]
    write_hf_folder(out, tensors, texts, files, shard_bytes, progress)


def renewed(
    hf_assets: tuple[Path, ...], config: MaxTextConfig, dtype: str
) -> dict[str, Any] | None:
    """The config.json that came with a model, true of the tensors that are written now, which are
    plain floats; None if none came, or if it was of a larger model than the text model that is
    written."""
    for file in hf_assets:
        if file.name == "config.json":
            hf = json.loads(file.read_text(encoding="utf-8"))
            if "text_config" in hf:
                return None
            key = "torch_dtype" if "torch_dtype" in hf else "dtype"
            hf.pop("quantization_config", None)
            if "num_nextn_predict_layers" in hf:
                hf["num_nextn_predict_layers"] = config.mtp_num_layers
            return hf | {key: dtype}
    return None


def model_param_infos(template: Template, config: MaxTextConfig) -> dict[str, ParamInfo]:
    return find_param_infos(template, segments(config))
