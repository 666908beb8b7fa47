"""PEFT folders of adapters, read. `peft_writer.py` writes them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.adapters import peft
from maxtext.adapters.binding import ModuleRule
from maxtext.adapters.modules import EMBEDDING, HEAD_WEIGHT, ModelModules
from maxtext.adapters.parameters import ParameterRule, nested_name, owner
from maxtext.adapters.spec import MAGNITUDE, A, Adapter, B
from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.checkpoint.tensors import TensorInfo, raise_problems
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path, read_json_object
from maxtext.common.hub import find_folder, model_name
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import HfMapping
from maxtext.layers.adapters import EMBEDDER, HEAD, AdapterSpec, AdapterTarget
from maxtext.models import hf_registry

MODULE_OF = {HEAD_WEIGHT: HEAD, EMBEDDING: EMBEDDER}  # of weights that adapters may save in full


def is_adapter_folder(folder: str | os.PathLike) -> bool:
    return (local_path(folder) / peft.CONFIG_FILE).is_file()


def read_adapter(folder: str | os.PathLike, config: MaxTextConfig) -> Adapter:
    """Read a PEFT folder for the model of a configuration. Raises ConfigError for adapters that are
    not supported, and UserError if tensors do not fit the model."""
    path = local_path(folder)
    if not is_adapter_folder(path):
        raise ConfigError(f"{path} has no {peft.CONFIG_FILE}: it is no PEFT adapter")
    settings = read_json_object(path / peft.CONFIG_FILE)
    lora = peft.LoraConfig.from_json(settings, str(path / peft.CONFIG_FILE))
    source = SafetensorsFolder.open(path, peft.TENSORS_STEM)
    names = canonical_tensors(source, hf_registry.mapping_for(config))
    return AdapterReader(ModelModules.of(config), lora, names, source).read(settings)


def canonical_tensors(source: SafetensorsFolder, mapping: HfMapping) -> dict[str, str]:
    """Names as rules have them, without PEFT's prefix -> names in the folder."""
    names = {}
    name_in_rules, name_in_module = mapping.module_renaming
    for name in source.tensors:
        module = name.removeprefix(peft.PREFIX)
        for old, new in hf_registry.PREFIXES.items():
            if module.startswith(old):
                module = new + module[len(old) :]
                break
        if name_in_module:
            module = module.replace(name_in_module, name_in_rules)
        names[module.replace(".lora_magnitude_vector.weight", peft.MAGNITUDE)] = name
    return names


@dataclass(frozen=True)
class AdapterReader:
    """Reads the tensors of a PEFT folder, all problems in one error."""

    modules: ModelModules
    lora: peft.LoraConfig
    names: Mapping[str, str]
    source: SafetensorsFolder

    def read(self, settings: Mapping[str, Any]) -> Adapter:
        by_rule: dict[int, list[str]] = {}
        rules: dict[int, ModuleRule] = {}
        experts: dict[str, list[str]] = {}
        embeddings: list[str] = []
        saved: list[str] = []
        problems: list[str] = []
        for name in self.names:
            module, kind = split_name(name)
            if kind in (peft.B, peft.MAGNITUDE, peft.EMBEDDING_B, peft.BASE_WEIGHT):
                continue
            rule = self.modules.by_hf.get(module)
            if kind == peft.A and owner(module) in self.modules.parameters_of_module:
                experts.setdefault(owner(module), []).append(module)
            elif kind == peft.A and rule is not None:
                by_rule.setdefault(id(rule), []).append(module)
                rules[id(rule)] = rule
            elif kind in (peft.EMBEDDING_A, peft.SAVED) and module in self.modules.saved_rules:
                (embeddings if kind == peft.EMBEDDING_A else saved).append(module)
            else:
                problems.append(f"{self.names[name]} {self.misfit(module, kind)}")
        for key, rule in rules.items():
            problems += self.rule_problems(rule, by_rule[key])
        for module, present in experts.items():
            problems += self.parameter_problems(module, present)
        is_tied = self.modules.config.logits_via_embedding
        if settings.get("ensure_weight_tying") and is_tied and (embeddings or saved):
            problems.append(
                f"ensure_weight_tying=true changes the head together with {(embeddings + saved)[0]}"
                ", which is not supported"
            )
        raise_problems(self.source.title, problems)
        targets: dict[str, AdapterTarget] = {}
        tensors: dict[str, np.ndarray] = {}
        for key, rule in rules.items():
            self.read_rule(rule, by_rule[key], targets, tensors)
        for module, present in experts.items():
            self.read_parameters(module, present, targets, tensors)
        for module in embeddings:
            self.read_embedding(module, targets, tensors)
        copies = dict(self.read_saved(module) for module in saved)
        spec = AdapterSpec(
            targets=tuple(sorted(targets.items())),
            rslora=self.lora.use_rslora,
            dora=self.lora.use_dora,
            dropout=self.lora.lora_dropout,
            saved=tuple(MODULE_OF[name] for name in copies),
            shared=self.modules.shared_layers(targets),
        )
        return Adapter(spec, tensors, copies, dict(settings))

    def misfit(self, module: str, kind: str) -> str:
        """Why the tensor of a module has no place in the model."""
        if kind == peft.A and module in self.modules.saved_rules:
            return "is of a head that is the model's embedding: save it in full (modules_to_save)"
        if kind == peft.SAVED and module + kind in self.modules.hf_names:
            return (
                "is saved in full, which is supported for "
                f"{' and '.join(self.modules.saved_rules)} alone"
            )
        return "is of a module that the model lacks"

    def rule_problems(self, rule: ModuleRule, present: Sequence[str]) -> list[str]:
        """What is wrong with the tensors of a rule's modules."""
        if rule.stacks_experts and len(present) < len(rule.hf):
            missing = next(module for module in rule.hf if module not in present)
            return [f"{missing}{peft.A} is missing: all experts must have an adapter"]
        problems = []
        shapes = {
            name.removesuffix(peft.SAVED): shape
            for name, shape in zip(rule.bind_a(1).hf_names, rule.bind_a(1).hf_shapes, strict=True)
        }
        outputs = dict(zip(rule.hf, (shape[0] for shape in rule.bind_b(1).hf_shapes), strict=True))
        for module in present:
            rank = self.lora.rank(self.target_in_folder(module))
            expected: dict[str, tuple[int, ...]] = {
                peft.A: (rank, shapes[module][1]),
                peft.B: (outputs[module], rank),
            }
            if self.lora.use_dora:
                expected[peft.MAGNITUDE] = (outputs[module],)
            for kind, shape in expected.items():
                name = module + kind
                if name not in self.names:
                    problems.append(f"{peft.PREFIX}{name} is missing")
                elif self.info(name).shape != shape:
                    problems.append(
                        f"{self.names[name]} has shape {list(self.info(name).shape)}, the model "
                        f"and {peft.CONFIG_FILE} need {list(shape)}"
                    )
        return problems

    def read_rule(
        self,
        rule: ModuleRule,
        present: Sequence[str],
        targets: dict[str, AdapterTarget],
        tensors: dict[str, np.ndarray],
    ) -> None:
        """Read the factors of a rule's modules; modules of a merged layer that lack an adapter have
        zeros."""
        first = present[0]
        ranks = {self.lora.rank(self.target_in_folder(module)) for module in present}
        alphas = {self.lora.alpha(self.target_in_folder(module)) for module in present}
        if len(ranks) > 1 or len(alphas) > 1:
            raise ConfigError(
                f"{self.source.title}: {', '.join(present)} are one layer here, and have ranks or "
                "alphas that differ"
            )
        (rank,), (alpha,) = ranks, alphas
        a, b = ([self.tensor(m, kind, first) for m in rule.hf] for kind in (peft.A, peft.B))
        a_arrays, b_arrays = rule.a_to_native(a), rule.b_to_native(b)
        total = a_arrays[0].shape[-1]
        for path, a_array, b_array in zip(rule.native, a_arrays, b_arrays, strict=True):
            targets[path] = self.at_rank(total, rank, alpha)
            tensors[f"{path}/{A}"] = a_array
            tensors[f"{path}/{B}"] = b_array
        if self.lora.use_dora:
            if rule.stacks_experts:
                raise ConfigError(f"{self.source.title}: DoRA of experts is not supported")
            magnitudes = [self.tensor(module, peft.MAGNITUDE, first) for module in rule.hf]
            for path, array in zip(rule.native, rule.magnitude_to_native(magnitudes), strict=True):
                tensors[f"{path}/{MAGNITUDE}"] = array

    def at_rank(self, rank: int, rank_in_folder: int, alpha: float) -> AdapterTarget:
        """A target of a rank other than in the folder, and of the same scale."""
        factor = rank / rank_in_folder
        return AdapterTarget(rank, alpha * (factor**0.5 if self.lora.use_rslora else factor))

    def target_parameters(self, module: str, present: Sequence[str]) -> dict[str, ParameterRule]:
        """The parameters of a module of experts that are targets, by the names of their tensors, of
        which `present` are in the folder."""
        in_folder = owner(self.name_in_folder(present[0]))
        selected = [
            rule
            for rule in self.modules.parameters_of_module[module]
            if self.lora.selects_parameter(f"{in_folder}.{rule.last_name}")
        ]
        return {nested_name(module, depth): rule for depth, rule in enumerate(reversed(selected))}

    def parameter_scale(self, name: str, rule: ParameterRule) -> tuple[int, float]:
        """Rank and alpha of the parameter whose tensors have a name."""
        in_folder = f"{owner(self.name_in_folder(name))}.{rule.last_name}"
        return self.lora.rank(in_folder), self.lora.alpha(in_folder)

    def parameter_problems(self, module: str, present: Sequence[str]) -> list[str]:
        """What is wrong with the tensors of a module of experts."""
        rules = self.target_parameters(module, present)
        if rules.keys() != set(present):
            return [
                f"{peft.PREFIX}{module} has adapters of {len(present)} parameters, and "
                f"target_parameters={list(self.lora.target_parameters)} selects {len(rules)} of "
                f"{', '.join(rule.last_name for rule in self.modules.parameters_of_module[module])}"
            ]
        problems = []
        for name, rule in rules.items():
            if name + peft.B not in self.names:
                problems.append(f"{peft.PREFIX}{name}{peft.B} is missing")
                continue
            rank, _ = self.parameter_scale(name, rule)
            if self.is_swapped(name, rule) is None:
                a, b = (list(self.info(name + kind).shape) for kind in (peft.A, peft.B))
                needed = " and ".join(str(list(shape)) for shape in rule.factor_shapes(rank))
                problems.append(
                    f"{rule.name} has factors {a} and {b}, the model and {peft.CONFIG_FILE} need "
                    f"{needed}"
                )
        return problems

    def is_swapped(self, name: str, rule: ParameterRule) -> bool | None:
        a, b = (self.info(name + kind).shape for kind in (peft.A, peft.B))
        return rule.is_swapped(a, b, self.parameter_scale(name, rule)[0])

    def read_parameters(
        self,
        module: str,
        present: Sequence[str],
        targets: dict[str, AdapterTarget],
        tensors: dict[str, np.ndarray],
    ) -> None:
        """Read the factors of the parameters of a module of experts."""
        for name, rule in self.target_parameters(module, present).items():
            rank, alpha = self.parameter_scale(name, rule)
            a, b = (self.source.read(self.names[name + kind]) for kind in (peft.A, peft.B))
            factors = rule.to_native(a, b, bool(self.is_swapped(name, rule)))
            for path, (lora_a, lora_b) in factors.items():
                targets[path] = self.at_rank(lora_a.shape[-1], rank, alpha)
                tensors[f"{path}/{A}"] = lora_a
                tensors[f"{path}/{B}"] = lora_b

    def tensor(self, module: str, kind: str, like: str) -> np.ndarray:
        """A tensor of a module; zeros if only other modules of its layer have an adapter."""
        if module + kind in self.names:
            return self.source.read(self.names[module + kind])
        if kind == peft.MAGNITUDE:
            raise ConfigError(
                f"{self.source.title}: {module} and {like} are one layer here, and DoRA needs an "
                "adapter of both"
            )
        info = self.info(like + kind)
        rule = self.modules.by_hf[module]
        outputs = rule.bind_b(1).hf_shapes[rule.hf.index(module)][0]
        shape = info.shape if kind == peft.A else (outputs, info.shape[1])
        return np.zeros(shape, info.dtype)

    def name_in_folder(self, module: str) -> str:
        """The module's name in a multimodal model, which the patterns of the folder are for."""
        return self.names[module + peft.A].removeprefix(peft.PREFIX).removesuffix(peft.A)

    def target_in_folder(self, module: str) -> str:
        return self.lora.target(self.name_in_folder(module))

    def info(self, name: str) -> TensorInfo:
        return self.source.tensors[self.names[name]]

    def read_embedding(
        self, module: str, targets: dict[str, AdapterTarget], tensors: dict[str, np.ndarray]
    ) -> None:
        if self.modules.saved_rules[module].native_names[0] != EMBEDDING or self.lora.use_dora:
            raise ConfigError(
                f"{self.source.title}: DoRA of embeddings, and embedding adapters of {module}, are "
                "not supported"
            )
        a, b = (
            self.source.read(self.names[module + kind])
            for kind in (peft.EMBEDDING_A, peft.EMBEDDING_B)
        )
        rank, shape = self.lora.rank(module), self.modules.param_infos[EMBEDDING].shape
        if a.shape != (rank, shape[0]) or b.shape != (shape[1], rank):
            raise UserError(
                f"{self.source.title} does not fit the model: {module} has factors "
                f"{list(a.shape)} and {list(b.shape)}, and the embedding is {list(shape)}"
            )
        targets[EMBEDDER] = AdapterTarget(rank, self.lora.alpha(module))
        tensors[f"{EMBEDDER}/{A}"] = np.ascontiguousarray(a.T)
        tensors[f"{EMBEDDER}/{B}"] = np.ascontiguousarray(b.T)

    def read_saved(self, module: str) -> tuple[str, np.ndarray]:
        rule = self.modules.saved_rules[module]
        tensor = self.source.read(self.names[module + peft.SAVED])
        if tensor.shape != rule.hf_shapes[0]:
            raise UserError(
                f"{self.source.title} does not fit the model: {module} has shape "
                f"{list(tensor.shape)}, the model needs {list(rule.hf_shapes[0])}"
            )
        return rule.native_names[0], rule.to_native([tensor])[0]


def split_name(name: str) -> tuple[str, str]:
    """(module, kind) of a tensor."""
    embedding = (peft.EMBEDDING_A, peft.EMBEDDING_B, peft.BASE_WEIGHT)
    for kind in (peft.A, peft.B, peft.MAGNITUDE, *embedding, peft.SAVED):
        if name.endswith(kind):
            return name.removesuffix(kind), kind
    return name, ""


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
