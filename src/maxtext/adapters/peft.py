"""PEFT's adapter folders: adapter_config.json, which modules it selects, and the names of tensors.

A folder has adapter_config.json and adapter_model.safetensors. The tensors of a module M are
`base_model.model.M.lora_A.weight` [r, in], `.lora_B.weight` [out, r] and, with DoRA,
`.lora_magnitude_vector` [out]; of an embedding `.lora_embedding_A` [r, V] and `.lora_embedding_B`
[E, r]; of a module that is saved in full `base_model.model.M.weight`.

`target_parameters` select parameters instead of modules, as experts that are one tensor. Tensors of
a parameter M.P have the name of the module M (`adapters/parameters.py`), and patterns of
ranks and alphas match the name of the parameter.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxtext.checkpoint.inspect import CheckpointSummary, StepSummary, TensorRow, size_of
from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path, read_json_object
from maxtext.common.hub import find_folder, model_name
from maxtext.common.types import Json

CONFIG_FILE, TENSORS_STEM = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
SAVED = ".weight"
BASE_LAYER = ".base_layer"  # what a module wraps
BASE_WEIGHT = BASE_LAYER + SAVED  # a copy of the base that PEFT adds for embeddings
ALL_LINEAR = "all-linear"
SHOWN = (  # what `maxtext inspect` shows of adapter_config.json
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "lora_dropout",
    "bias",
)
# Fields that change what an adapter computes, with the only values that are supported.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, [], ()),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
# Initializations that also change the base weights: the folder alone does not say the adapter.
CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    """The settings of a LoRA adapter, under PEFT's names."""

    r: int
    lora_alpha: float
    target_modules: str | Sequence[str] = ()
    target_parameters: Sequence[str] = ()
    exclude_modules: str | Sequence[str] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_dropout: float = 0.0

    @classmethod
    def from_json(cls, settings: Json, source: str) -> "LoraConfig":
        """Raises ConfigError for adapters that cannot be represented."""
        problems = []
        for name, allowed in REQUIRED.items():
            if name in settings and settings[name] not in allowed:
                problems.append(
                    f"{source}: {name}={settings[name]!r} is not supported, only {allowed[0]!r}"
                )
        init = settings.get("init_lora_weights")
        if isinstance(init, str) and init.startswith(CHANGE_BASE):
            problems.append(
                f"{source}: init_lora_weights={init!r} changes the base weights; convert the "
                "adapter to plain LoRA when it is saved with PEFT"
            )
        for name in ("r", "lora_alpha"):
            value = settings.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                problems.append(f"{source}: {name}={value!r} must be a positive number")
        problems += target_problems(settings, source)
        if problems:
            raise ConfigError(*problems)
        names = cls.__dataclass_fields__
        given = {
            name: value for name, value in settings.items() if name in names and value is not None
        }
        return cls(**given)

    def selects(self, module: str) -> bool:
        """Whether a module has an adapter, by PEFT's rules."""
        if self.exclude_modules and matches_names(self.exclude_modules, module):
            return False
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save or ()):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True
        return matches_names(self.target_modules, module) and self.selects_layer(module)

    def selects_parameter(self, name: str) -> bool:
        """Whether a parameter has an adapter of its own."""
        return matches_names(self.target_parameters, name)

    def target(self, module: str) -> str:
        """The name that patterns match for a module's adapter: that of its weight, if the weight is
        a target parameter."""
        weight = module + SAVED
        return weight if self.selects_parameter(weight) else module

    def selects_layer(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module)
            if match:
                index = int(match["index"])
                return index == layers if isinstance(layers, int) else index in layers
        return False

    def rank(self, module: str) -> int:
        return int(by_pattern(self.rank_pattern, module, self.r))

    def alpha(self, module: str) -> float:
        return float(by_pattern(self.alpha_pattern, module, self.lora_alpha))


def target_problems(settings: Json, source: str) -> list[str]:
    modules, parameters = settings.get("target_modules"), settings.get("target_parameters")
    if parameters and not (
        isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)
    ):
        return [f"{source}: target_parameters={parameters!r} must be a list of names"]
    if parameters and settings.get("use_dora"):
        return [f"{source}: use_dora=true is not supported with target_parameters, as in PEFT"]
    if not parameters and (not isinstance(modules, str | list) or not modules):
        return [f"{source}: target_modules={modules!r} must be a text or a list"]
    return []


def matches_names(names: str | Sequence[str], module: str) -> bool:
    """Whether a module has one of the names, or is one by its last parts; or fully matches a
    pattern."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapter_settings(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    modules: Sequence[str],
    base_name: str,
    parameters: Mapping[str, bool] | None = None,
    **options: Any,
) -> Json:
    """The adapter_config.json for adapters of these ranks and alphas by target. `modules` are all
    linear modules of the model, and `parameters` all parameters with whether they are targets; the
    names that are written select no other."""
    parameters = parameters or {}
    target_parameters = [name for name, is_target in parameters.items() if is_target]
    target_modules = [name for name in ranks if not parameters.get(name)]
    rank, alpha = most_common(ranks.values()), most_common(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": whole(alpha),
        "target_modules": shortest_names(target_modules, modules),
        "target_parameters": shortest_names(target_parameters, list(parameters), 2) or None,
        "rank_pattern": exact_patterns({m: r for m, r in ranks.items() if r != rank}),
        "alpha_pattern": exact_patterns({m: whole(a) for m, a in alphas.items() if a != alpha}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        **options,
    }


def shortest_names(
    selected: Sequence[str], modules: Sequence[str], num_parts: int = 1
) -> list[str]:
    """Last parts of the selected modules' names, if no other module has them; else full names."""
    names = sorted({".".join(module.split(".")[-num_parts:]) for module in selected})
    chosen = set(selected)
    others = (module for module in modules if module not in chosen)
    if any(matches_names(names, module) for module in others):
        return sorted(selected)
    return names


def exact_patterns(values: Mapping[str, Any]) -> Json:
    return {re.escape(module): value for module, value in values.items()}


def most_common(values: Any) -> Any:
    values = list(values)
    return max(values, key=values.count)


def whole(value: float) -> float:
    """An int for a whole number: PEFT writes them so."""
    return int(value) if float(value).is_integer() else value


def is_adapter_folder(folder: str | os.PathLike) -> bool:
    return (local_path(folder) / CONFIG_FILE).is_file()


def adapter_folders(path: str | os.PathLike, access_token: str | None = None) -> dict[str, Path]:
    """The adapters at a path by name: one PEFT folder, or the PEFT folders in it; `org/name` of the
    Hugging Face Hub is the adapter `name`.
    """
    folder = find_folder(path, access_token)
    if is_adapter_folder(folder):
        return {model_name(os.fspath(path)): folder}
    folders = {
        child.name: child
        for child in sorted(folder.iterdir() if folder.is_dir() else [])
        if child.is_dir() and is_adapter_folder(child)
    }
    if not folders:
        raise ConfigError(f"{path} is neither a PEFT adapter nor a folder of them")
    return folders


def owner(name: str) -> str:
    """The module of such a name."""
    while name.endswith(BASE_LAYER):
        name = name.removesuffix(BASE_LAYER)
    return name


def summarize(path: Path) -> CheckpointSummary:
    """A PEFT folder, for `maxtext inspect`: its settings that differ from PEFT's defaults, and its
    tensors."""
    settings = read_json_object(path / CONFIG_FILE)
    folder = SafetensorsFolder.open(path, TENSORS_STEM)
    about = {
        name: value
        for name in SHOWN
        if (value := settings.get(name)) not in (None, False, [], {}, "none", 0.0)
    }
    rows = tuple(TensorRow(name, tensor) for name, tensor in folder.tensors.items())
    files = StepSummary(path, size_of(path), "complete files; this format has no digest")
    return CheckpointSummary(path, "PEFT adapter", (files,), about, rows)
