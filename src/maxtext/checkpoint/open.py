"""Opens and saves model checkpoints: the settings of the model, and its weights by native names.

`open_checkpoint` opens three kinds of folders: Hugging Face folders (config.json, model.safetensors
…), native folders (config.yml, weights.safetensors …, and in hugging_face/ the files that came with
the model), and training checkpoints, of which it takes the newest step. Hugging Face and native
folders can be converted into each other.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxtext.checkpoint import steps
from maxtext.checkpoint.convert.conversion import from_hf, to_hf
from maxtext.checkpoint.manager import MODEL_FILE
from maxtext.checkpoint.quantized import (
    CODES,
    SCALE,
    Dequantized,
    QuantizedFolder,
    quantized_weight_dtype,
)
from maxtext.checkpoint.safetensors_reader import (
    HF_STEM,
    NATIVE_STEM,
    SafetensorsFolder,
    find_hf_assets,
)
from maxtext.checkpoint.safetensors_writer import write_hf_folder, write_native_folder
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.state import match_names
from maxtext.checkpoint.tensors import (
    DTYPES,
    Progress,
    RenamedTensors,
    TensorSource,
    TensorStream,
    WithTensor,
)
from maxtext.checkpoint.training_weights import TrainingWeights
from maxtext.checkpoint.weights import ParamInfo, find_param_infos
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.hub import find_folder
from maxtext.common.log import LOGGER
from maxtext.common.types import Json, Tree
from maxtext.configs import rules, serialize, types
from maxtext.configs.load import base_values
from maxtext.configs.problems import ProblemKind
from maxtext.configs.provenance import Layer, Setting, Source
from maxtext.configs.sources import read_yaml
from maxtext.configs.types import MaxTextConfig
from maxtext.hf import schema
from maxtext.hf.config_json import HfMapping
from maxtext.hf.quantized import quantized_format
from maxtext.layers.parameters import Template
from maxtext.models import hf_registry
from maxtext.models.registry import segments
from maxtext.models.rules import check_layers
from maxtext.tokenizers.load import tokenizer_files

HF_HEAD = "lm_head.weight"
INIT_DEVIATION = 0.02  # of new weights: transformers' initializer_range
HF_ASSETS_DIR, TENSOR_NAMES_FILE = "hugging_face", "tensor_names.json"
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
# Keys that define a model, not how it runs
MODEL_GROUPS = (
    types.ModelArchitecture,
    types.MTP,
    types.Logits,
    types.Attention,
    types.MoBa,
    types.MlaAttention,
    types.AttentionIndexer,
    types.Llama4Attention,
    types.MoEGeneral,
    types.DeepSeekMoE,
    types.Qwen3Next,
    types.PositionalEmbedding,
    types.Rope,
    types.YarnRope,
    types.ManifoldConstrainedHyperConnections,
    types.Engram,
)
MODEL_KEYS = (
    "vocab_size",
    "num_labels",
    *(key for group in MODEL_GROUPS for key in group.model_fields if key != "attention"),
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder."""

    path: Path
    source: TensorStream  # its tensors, dequantized
    settings: Layer  # of the model, as a model's YAML file would give them
    hf_assets: tuple[Path, ...]  # Hugging Face configuration and tokenizer files
    hf_tensor_names: frozenset[str]  # in the Hugging Face folder, if known
    mapping: HfMapping | None = None  # of a Hugging Face folder
    has_own_head: bool = False  # config.json says that the head is tied; its tensor differs

    @property
    def model_layer(self) -> Layer:
        """The settings, with the path of the tokenizer if the folder has one."""
        files = tokenizer_files(self.hf_assets)
        if not files:
            return self.settings
        source = Source("model", str(self.path))
        return {**self.settings, "tokenizer_path": Setting(str(files[0].parent), source)}

    def weights(
        self,
        config: MaxTextConfig,
        param_infos: Mapping[str, ParamInfo],
        dtype: np.dtype | None = None,
    ) -> Tree:
        """The tensors as weights of a native model, by its names."""
        if config.num_labels and "num_labels" not in self.settings:
            return with_new_head(self, config, param_infos, dtype)
        return self.stored_weights(config, param_infos, dtype)

    def stored_weights(
        self, config: MaxTextConfig, param_infos: Mapping[str, ParamInfo], dtype: np.dtype | None
    ) -> Tree:
        if self.mapping is None:
            return under_current_names(self.source, param_infos)
        if self.has_own_head and not config.num_labels and config.logits_via_embedding:
            raise UserError(
                f"{self.path} has an lm_head.weight that differs from the embedding, and "
                "logits_via_embedding=true would drop it: set logits_via_embedding=false"
            )
        renamed = hf_registry.canonical_names(self.source.tensors, self.mapping)
        if config.logits_via_embedding and HF_HEAD in renamed:
            # transformers ties to whichever of the two tensors is there.
            renamed.setdefault(self.mapping.embedding, renamed[HF_HEAD])
        source = RenamedTensors(self.source, renamed)
        weights = from_hf(
            source,
            hf_registry.rules(self.mapping, config),
            param_infos,
            hf_registry.ignored_tensors(self.mapping, config),
            dtype,
        )
        unused = set(renamed).difference(*(step.hf_names for step in weights.steps))
        if unused:
            LOGGER.info(
                "%s: %d tensors are not part of the model: %s …",
                self.path,
                len(unused),
                min(unused),
            )
        return weights


def with_new_head(
    checkpoint: Checkpoint,
    config: MaxTextConfig,
    param_infos: Mapping[str, ParamInfo],
    dtype: np.dtype | None,
) -> TensorStream:
    """The weights of a language model as those of a reward model: in place of its head a random
    one, normally distributed with transformers' deviation."""
    head = hf_registry.NATIVE_HEAD
    others = {name: info for name, info in param_infos.items() if name != head}
    source = checkpoint.stored_weights(config, others, dtype)
    LOGGER.info("%s is a language model: the head of the reward model is new", checkpoint.path)
    info = param_infos[head]
    rng = np.random.default_rng(config.init_weights_seed)
    weight = (INIT_DEVIATION * rng.standard_normal(info.shape)).astype(dtype or info.dtype)
    return WithTensor(source, head, weight, frozenset(others))


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
    """Open a folder, or a model by its name on the Hugging Face Hub."""
    path = find_folder(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    if any((path / f"{NATIVE_STEM}.safetensors{end}").exists() for end in ("", ".index.json")):
        return open_native_folder(path)
    if steps.has_steps(path):
        return open_training_checkpoint(steps.find_steps(path.absolute())[-1])
    hf_config = hf_registry.read_config(path)
    config_path = str(path / "config.json")
    mapping = hf_registry.mapping_of(hf_config, config_path)
    weights_format = quantized_format(hf_config, config_path)
    settings = hf_registry.read_settings(mapping, hf_config, config_path)
    hf_registry.check_model(settings, config_path)
    hf_assets = tuple(find_hf_assets(path))
    check_hf_assets(hf_assets)
    source: TensorStream = SafetensorsFolder.open(path, HF_STEM)
    if weights_format is not None:
        source = Dequantized.of(source, weights_format)
    names = hf_registry.canonical_names(source.tensors, mapping)
    has_own_head = settings["logits_via_embedding"].value and differs_from_embedding(
        RenamedTensors(source, names), mapping
    )
    if has_own_head:
        LOGGER.warning(
            "%s says tie_word_embeddings=true, but lm_head.weight differs from the embedding: the "
            "model is not tied (set tie_word_embeddings to false to silence this warning)",
            config_path,
        )
        settings["logits_via_embedding"] = Setting(False, Source("model", str(path)))
    return Checkpoint(
        path=path,
        source=source,
        settings=settings,
        hf_assets=hf_assets,
        hf_tensor_names=frozenset(names),
        mapping=mapping,
        has_own_head=has_own_head,
    )


def differs_from_embedding(source: TensorSource, mapping: HfMapping) -> bool:
    """Whether a folder has an output head with values of its own, which transformers does not tie
    whatever config.json says.
    """
    if not {HF_HEAD, mapping.embedding} <= source.tensors.keys():
        return False
    if source.tensors[HF_HEAD].shape != source.tensors[mapping.embedding].shape:
        return True
    head, embedding = source.read(HF_HEAD), source.read(mapping.embedding)
    if head.dtype != embedding.dtype:
        head, embedding = head.astype(np.float32), embedding.astype(np.float32)
    return not np.array_equal(head, embedding)


def check_hf_assets(files: Iterable[Path]) -> None:
    """Raise ConfigError for a damaged file that will be read later."""
    for file in files:
        if file.name == "generation_config.json":
            schema.check_generation_config(file)


def open_native_folder(path: Path) -> Checkpoint:
    if not (path / "config.yml").is_file():
        raise UserError(f"{path} has weights but no config.yml, which describes their model")
    settings = read_yaml(path / "config.yml", "model")
    settings.pop("base_config", None)
    hf_assets = (
        tuple(find_hf_assets(path / HF_ASSETS_DIR)) if (path / HF_ASSETS_DIR).is_dir() else ()
    )
    check_hf_assets(hf_assets)
    names: frozenset[str] = frozenset()
    for file in hf_assets:
        if file.name == "config.json":
            hf_registry.read_config(file.parent)
        if file.name == TENSOR_NAMES_FILE:
            names = read_names(file)
    folder = SafetensorsFolder.open(path, NATIVE_STEM)
    source: TensorStream = folder
    if "checkpoint_is_quantized" in settings:
        source = QuantizedFolder.of(folder, read_quantized_dtype(settings, path))
    return Checkpoint(
        path=path, source=source, settings=settings, hf_assets=hf_assets, hf_tensor_names=names
    )


def read_names(file: Path) -> frozenset[str]:
    """The names of the tensors that native weights were converted from."""
    try:
        names = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{file} must hold a JSON list of names")
    return frozenset(names)


def read_quantized_dtype(settings: Layer, path: Path) -> str:
    """The dtype of the quantized weights of a native folder."""
    dtype = settings["quantization"].value if "quantization" in settings else None
    if dtype not in CODES or dtype is None:
        raise UserError(
            f"{path / 'config.yml'} must say quantization: {' or '.join(CODES)}, not {dtype}"
        )
    return dtype


def open_training_checkpoint(step: Path) -> Checkpoint:
    settings = read_yaml(step / steps.RUN / MODEL_FILE, "model")
    settings.pop("base_config", None)
    return Checkpoint(
        path=step,
        source=TrainingWeights(SavedStep(step), settings),
        settings=settings,
        hf_assets=(),
        hf_tensor_names=frozenset(),
    )


def with_max_positions(settings: Layer, keys: Json) -> Json:
    """The keys with max_target_length set to the number of learned positions, unless they set it
    or the model has no learned positions.
    """
    num_positions = settings.get("trainable_position_size")
    if num_positions is None or "max_target_length" in keys:
        return keys
    return keys | {"max_target_length": num_positions.value}


def parse_dtype(name: str | None) -> np.dtype | None:
    return None if name is None else DTYPES[DTYPE_NAMES[name]]


def model_text(config: MaxTextConfig) -> str:
    """A config.yml with the keys that define a configuration's model, and none about how it
    runs.
    """
    base = base_values()
    changed = [
        key
        for key in serialize.KEYS_IN_ORDER
        if key in MODEL_KEYS and getattr(config, key) != getattr(base, key)
    ]
    # Loading the file refuses keys that have no effect, so they are not written.
    as_file = config.attributed_to(Source("file", "config.yml"))
    inert = {
        problem.key
        for problem in rules.check_settings(as_file) + check_layers(as_file)
        if problem.kind is ProblemKind.INERT
    }
    return "base_config: base.yml\n" + serialize.yaml_text(
        config, (key for key in changed if key not in inert)
    )


def save_native(
    out: str | os.PathLike,
    config: MaxTextConfig,
    weights: TensorStream,
    hf_assets: tuple[Path, ...] = (),
    hf_tensor_names: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    shard_bytes: int = 2 * 10**9,
) -> None:
    """Save a native folder; its config.yml says whether the weights are quantized.
    `hf_tensor_names` are the tensors that the weights were read from, so that they can be converted
    back.
    """
    files = [file for file in hf_assets if file.name != TENSOR_NAMES_FILE]
    config_yml = model_text(config)
    if dtype := quantized_weight_dtype(config):
        config_yml += f"quantization: {dtype}\ncheckpoint_is_quantized: true\n"
    texts = {"config.yml": config_yml}
    if hf_tensor_names:
        texts[f"{HF_ASSETS_DIR}/{TENSOR_NAMES_FILE}"] = json.dumps(sorted(hf_tensor_names))
    write_native_folder(out, weights, texts, files, shard_bytes, progress)


def save_hf_folder(
    out: str | os.PathLike,
    config: MaxTextConfig,
    param_infos: Mapping[str, ParamInfo],
    weights: TensorStream,
    hf_assets: tuple[Path, ...] = (),
    hf_tensor_names: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    shard_bytes: int = 5 * 10**9,
    text_only: bool = False,
) -> None:
    """Save a Hugging Face folder. Its config.json is the one in `hf_assets`, if any, since it may
    have more fields than the settings, with its fields about the tensors updated.

    Raises ConfigError if the weights came from a folder with vision or audio tensors, unless
    text_only=True allows that they are lost.
    """
    if not text_only:
        hf_registry.refuse_multimodal(hf_tensor_names)
    rules = hf_registry.rules(hf_registry.mapping_for(config), config)
    tensors = to_hf(weights, rules, param_infos, hf_tensor_names)
    dtype = max(tensors.tensors.values(), key=lambda tensor: tensor.nbytes).dtype.name
    hf_config = update_hf_config(hf_assets, config, dtype) or hf_registry.hf_config(config, dtype)
    texts = {"config.json": json.dumps(hf_config, indent=2)}
    files = [file for file in hf_assets if file.name != TENSOR_NAMES_FILE]
    write_hf_folder(out, tensors, texts, files, shard_bytes, progress)


def update_hf_config(hf_assets: tuple[Path, ...], config: MaxTextConfig, dtype: str) -> Json | None:
    """The config.json that came with a model, updated for the tensors that are written, which are
    plain floats. None if there is none, or if it is of a multimodal model, of which only the text
    model is written.
    """
    for file in hf_assets:
        if file.name == "config.json":
            hf_config = json.loads(file.read_text(encoding="utf-8"))
            if "text_config" in hf_config:
                return None
            dtype_key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
            hf_config.pop("quantization_config", None)
            if "num_nextn_predict_layers" in hf_config:
                hf_config["num_nextn_predict_layers"] = config.mtp_num_layers
            if not config.logits_via_embedding and is_tied(hf_config, config):
                hf_config["tie_word_embeddings"] = False  # the head has weights of its own
            if config.num_labels:
                hf_config |= hf_registry.classifier_entries(hf_registry.mapping_for(config))
            return hf_config | {dtype_key: dtype}
    return None


def is_tied(hf_config: Json, config: MaxTextConfig) -> bool:
    field = hf_registry.mapping_for(config).entries["tie_word_embeddings"]
    return bool(hf_config.get(field.hf, field.default))


def model_param_infos(template: Template, config: MaxTextConfig) -> dict[str, ParamInfo]:
    return find_param_infos(template, segments(config))
