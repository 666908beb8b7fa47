"""PEFT folders of adapters, written."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from maxtext.adapters import peft
from maxtext.adapters.binding import ModuleRule
from maxtext.adapters.modules import EMBEDDING, ROUTER, ModelModules
from maxtext.adapters.parameters import ParameterRule, nested_name
from maxtext.adapters.spec import MAGNITUDE, A, Adapter, B
from maxtext.checkpoint.safetensors_writer import write_folder
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import EMBEDDER, AdapterSpec
from maxtext.models import hf_registry


@dataclass(frozen=True)
class NamedArrays:
    """Arrays in memory as a stream of tensors."""

    arrays: Mapping[str, np.ndarray]
    title: str = "the adapter"

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(array.dtype, array.shape) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(self.arrays.items())


def write_adapter(
    folder: str | os.PathLike,
    adapter: Adapter,
    config: MaxTextConfig,
    base_name: str = "",
    hf_tensor_names: Collection[str] = (),
) -> None:
    """Write a PEFT folder. `hf_tensor_names` are those of the base's folder, whose modules PEFT
    names otherwise if it is multimodal. Raises UserError if the folder exists."""
    tensors, settings = to_peft(adapter, ModelModules.of(config), base_name, hf_tensor_names)
    texts = {peft.CONFIG_FILE: json.dumps(settings, indent=2, sort_keys=True)}
    named = NamedArrays({peft.PREFIX + name: array for name, array in tensors.items()})
    write_folder(folder, named, peft.TENSORS_STEM, texts, {}, 5 * 10**9)


def to_peft(
    adapter: Adapter,
    modules: ModelModules,
    base_name: str,
    hf_tensor_names: Collection[str] = (),
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a PEFT folder without their prefix, and its adapter_config.json."""
    writer = AdapterWriter(adapter, modules, hf_registry.text_prefixes(hf_tensor_names))
    return writer.write(base_name)


@dataclass
class AdapterWriter:
    """Collects the tensors of a PEFT folder.

    Routed experts and routers, which are no modules in transformers 5, are target_parameters, and
    so are weights of modules with the name of an expert's projection, as a shared expert's
    gate_proj: PEFT would take target_modules of such a name for the experts. An adapter that was
    read from a folder has the targets of that folder, and one with DoRA, which parameters cannot
    have, only modules.
    """

    adapter: Adapter
    modules: ModelModules
    prefixes: tuple[str, str]  # how names begin in rules, and in the model of the folder
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    # By target: a module, or a parameter, which `parameters` has, too.
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    saved_names: list[str] = field(default_factory=list)

    @cached_property
    def original(self) -> peft.LoraConfig | None:
        """The settings of the folder that the adapter was read from."""
        if not self.adapter.settings:
            return None
        return peft.LoraConfig.from_json(self.adapter.settings, peft.CONFIG_FILE)

    def write(self, base_name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        paths = [path for path in self.adapter.spec.by_path if path != EMBEDDER]
        stacked = {path for path in paths if self.is_parameter(self.modules.parameter_of.get(path))}
        used = {id(self.modules.by_native[path]) for path in paths if path not in stacked}
        for rule in self.modules.rules:
            if id(rule) in used:
                self.add_modules(rule)
        for rules in self.modules.parameters_of_module.values():
            self.add_parameters([rule for rule in rules if stacked & set(rule.native)])
        self.add_outer_modules()
        return self.tensors, self.settings(base_name)

    def folder_name(self, name: str, renamed: bool = False) -> str:
        """A name of a tensor, module or parameter in the folder; `renamed`, as transformers 5 has
        it, where that differs from the base's folder."""
        old, new = self.prefixes
        if name.startswith(old):
            name = new + name.removeprefix(old)
        name_in_rules, name_in_module = hf_registry.mapping_for(self.modules.config).module_renaming
        if renamed and name_in_rules:
            name = name.replace(name_in_rules, name_in_module)
        return name

    def is_parameter(self, rule: ParameterRule | None) -> bool:
        """Whether all experts of a layer are written as one parameter."""
        if rule is None or self.adapter.spec.dora:
            return False
        if self.original is None:
            return True
        return self.original.selects_parameter(self.folder_name(rule.name, renamed=True))

    def is_weight_target(self, module: str) -> bool:
        """Whether a module is selected by its weight, as a parameter."""
        if self.original is not None:
            weight = self.folder_name(module, renamed=True) + peft.SAVED
            return self.original.selects_parameter(weight)
        is_router = self.modules.by_hf[module].native[0].endswith(ROUTER)
        is_ambiguous = module.rpartition(".")[2] in self.modules.expert_names
        return (is_router or is_ambiguous) and not self.adapter.spec.dora

    def scale(self, paths: Sequence[str], target: str) -> float:
        """That of native layers which are one target."""
        spec = self.adapter.spec
        scales = {spec.scale(spec.by_path[path]) for path in paths}
        if len(scales) > 1:
            raise ConfigError(f"{', '.join(paths)} have different scales, and are one {target}")
        return next(iter(scales))

    def factors(self, paths: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        tensors = self.adapter.tensors
        return {path: (tensors[f"{path}/{A}"], tensors[f"{path}/{B}"]) for path in paths}

    def add_modules(self, rule: ModuleRule) -> None:
        spec = self.adapter.spec
        present = [path for path in rule.native if path in spec.by_path]
        scale = self.scale(present, "HF module")
        for module, (a, b) in zip(rule.hf, rule.to_hf(self.factors(present)), strict=True):
            name = target = self.folder_name(module)
            if self.is_weight_target(module):
                name = self.folder_name(module, renamed=True)
                target = name + peft.SAVED
                self.parameters.add(target)
            self.tensors |= {name + peft.A: a, name + peft.B: b}
            self.ranks[target] = a.shape[0]
            self.alphas[target] = scales_to_alpha(spec, scale, a.shape[0], present)
        if spec.dora:
            magnitudes = {path: self.adapter.tensors[f"{path}/{MAGNITUDE}"] for path in present}
            for module, array in zip(rule.hf, rule.magnitude_to_hf(magnitudes), strict=True):
                self.tensors[self.folder_name(module) + peft.MAGNITUDE] = array

    def add_parameters(self, rules: Sequence[ParameterRule]) -> None:
        """Add parameters of one module, in the order of the module."""
        spec = self.adapter.spec
        for depth, rule in enumerate(reversed(rules)):
            present = [path for path in rule.native if path in spec.by_path]
            a, b = rule.to_hf(self.factors(present))
            rank = a.shape[0] // rule.experts
            name = self.folder_name(nested_name(rule.module, depth), renamed=True)
            self.tensors |= {name + peft.A: a, name + peft.B: b}
            target = self.folder_name(rule.name, renamed=True)
            self.parameters.add(target)
            self.ranks[target] = rank
            scale = self.scale(present, "HF parameter")
            self.alphas[target] = scales_to_alpha(spec, scale, rank, present)

    def add_outer_modules(self) -> None:
        """Add the embedding and the head, which may be saved in full."""
        spec, arrays = self.adapter.spec, self.adapter.tensors
        for module, bound in self.modules.saved_rules.items():
            name, native = self.folder_name(module), bound.native_names[0]
            if native == EMBEDDING and EMBEDDER in spec.by_path:
                for kind, factor in ((peft.EMBEDDING_A, A), (peft.EMBEDDING_B, B)):
                    self.tensors[name + kind] = np.ascontiguousarray(
                        arrays[f"{EMBEDDER}/{factor}"].T
                    )
                target = spec.by_path[EMBEDDER]
                self.ranks[name], self.alphas[name] = target.rank, target.alpha
            if native in self.adapter.saved:
                (self.tensors[name + peft.SAVED],) = bound.to_hf([self.adapter.saved[native]])
                self.saved_names.append(module.rpartition(".")[2])

    def settings(self, base_name: str) -> dict[str, Any]:
        """The adapter_config.json."""
        spec = self.adapter.spec
        every = [
            self.folder_name(name) for name in (*self.modules.by_hf, *self.modules.saved_rules)
        ]
        expert_tensors = {module + peft.SAVED for module in self.modules.expert_modules}
        names = self.modules.hf_names - expert_tensors
        parameters = [self.folder_name(name, renamed=True) for name in names]
        if self.prefixes[
            1
        ]:  # other parts of a multimodal model have modules of the same last names
            every += [f"vision.{module}" for module in every]
            parameters += [f"vision.{name}" for name in parameters]
        settings = peft.adapter_settings(
            self.ranks,
            self.alphas,
            every,
            base_name,
            parameters={name: name in self.parameters for name in parameters},
            use_rslora=spec.rslora,
            use_dora=spec.dora,
            lora_dropout=0.0 if self.parameters else spec.dropout,  # PEFT has none of parameters
            modules_to_save=self.saved_names or None,
        )
        original = self.original
        if original and all(original.rank(name) == rank for name, rank in self.ranks.items()):
            settings |= self.adapter.settings
        return settings


def scales_to_alpha(spec: AdapterSpec, scale: float, rank: int, present: Sequence[str]) -> float:
    """The alpha that gives a scale at a rank; the target's own, if its rank is unchanged."""
    target = spec.by_path[present[0]]
    if target.rank == rank:
        return target.alpha
    return scale * (rank**0.5 if spec.rslora else rank)
