"""PEFT folders of adapters, read and written."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint.adapter_modules import EMBEDDING, HEAD_WEIGHT, ModelModules, ModuleRule
from maxtext.checkpoint.adapters import MAGNITUDE, A, Adapter, B
from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_folder
from maxtext.checkpoint.tensors import TensorInfo, raise_problems
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path, read_json_object
from maxtext.common.hub import find_folder, model_name
from maxtext.configs.types import MaxTextConfig
from maxtext.hf import peft
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
    reader = AdapterReader(ModelModules.of(config), lora, canonical_tensors(source), source)
    return reader.read(settings)


def canonical_tensors(source: SafetensorsFolder) -> dict[str, str]:
    """Names as rules have them, without PEFT's prefix -> names in the folder."""
    names = {}
    for name in source.tensors:
        module = name.removeprefix(peft.PREFIX)
        for old, new in hf_registry.PREFIXES.items():
            if module.startswith(old):
                module = new + module[len(old) :]
                break
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
        embeddings: list[str] = []
        saved: list[str] = []
        problems: list[str] = []
        for name in self.names:
            module, kind = split_name(name)
            if kind in (peft.B, peft.MAGNITUDE, peft.EMBEDDING_B, peft.BASE_LAYER):
                continue
            rule = self.modules.by_hf.get(module)
            if kind == peft.A and rule is not None:
                by_rule.setdefault(id(rule), []).append(module)
                rules[id(rule)] = rule
            elif kind in (peft.EMBEDDING_A, peft.SAVED) and module in self.modules.saved_rules:
                (embeddings if kind == peft.EMBEDDING_A else saved).append(module)
            else:
                problems.append(f"{self.names[name]} {self.misfit(module, kind)}")
        for key, rule in rules.items():
            problems += self.rule_problems(rule, by_rule[key])
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
        for module in embeddings:
            self.read_embedding(module, targets, tensors)
        copies = dict(self.read_saved(module) for module in saved)
        spec = AdapterSpec(
            targets=tuple(sorted(targets.items())),
            rslora=self.lora.use_rslora,
            dora=self.lora.use_dora,
            dropout=self.lora.lora_dropout,
            saved=tuple(MODULE_OF[name] for name in copies),
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
            rank = self.lora.rank(self.name_in_folder(module))
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
        ranks = {self.lora.rank(self.name_in_folder(module)) for module in present}
        alphas = {self.lora.alpha(self.name_in_folder(module)) for module in present}
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
            factor = total / rank
            total_alpha = alpha * (factor**0.5 if self.lora.use_rslora else factor)
            targets[path] = AdapterTarget(total, total_alpha)
            tensors[f"{path}/{A}"] = a_array
            tensors[f"{path}/{B}"] = b_array
        if self.lora.use_dora:
            if rule.stacks_experts:
                raise ConfigError(f"{self.source.title}: DoRA of experts is not supported")
            magnitudes = [self.tensor(module, peft.MAGNITUDE, first) for module in rule.hf]
            for path, array in zip(rule.native, rule.magnitude_to_native(magnitudes), strict=True):
                tensors[f"{path}/{MAGNITUDE}"] = array

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
    embedding = (peft.EMBEDDING_A, peft.EMBEDDING_B, peft.BASE_LAYER)
    for kind in (peft.A, peft.B, peft.MAGNITUDE, *embedding, peft.SAVED):
        if name.endswith(kind):
            return name.removesuffix(kind), kind
    return name, ""


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
    spec, tensors = adapter.spec, dict[str, np.ndarray]()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    rules = {id(rule): rule for rule in modules.rules}
    used = {id(modules.by_native[path]) for path in spec.by_path if path != EMBEDDER}
    for key, rule in rules.items():
        if key not in used:
            continue
        present = [path for path in rule.native if path in spec.by_path]
        scales = {spec.scale(spec.by_path[path]) for path in present}
        if len(scales) > 1:
            raise ConfigError(f"{', '.join(present)} have different scales, and are one HF module")
        factors = {
            path: (adapter.tensors[f"{path}/{A}"], adapter.tensors[f"{path}/{B}"])
            for path in present
        }
        for module, (a, b) in zip(rule.hf, rule.to_hf(factors), strict=True):
            tensors |= {module + peft.A: a, module + peft.B: b}
            rank = a.shape[0]
            ranks[module] = rank
            alphas[module] = scales_to_alpha(spec, next(iter(scales)), rank, present)
        if spec.dora:
            magnitudes = {path: adapter.tensors[f"{path}/{MAGNITUDE}"] for path in present}
            for module, array in zip(rule.hf, rule.magnitude_to_hf(magnitudes), strict=True):
                tensors[module + peft.MAGNITUDE] = array
    saved_names = []
    for module, bound in modules.saved_rules.items():
        name = bound.native_names[0]
        if name == EMBEDDING and EMBEDDER in spec.by_path:
            tensors[module + peft.EMBEDDING_A] = np.ascontiguousarray(
                adapter.tensors[f"{EMBEDDER}/{A}"].T
            )
            tensors[module + peft.EMBEDDING_B] = np.ascontiguousarray(
                adapter.tensors[f"{EMBEDDER}/{B}"].T
            )
            target = spec.by_path[EMBEDDER]
            ranks[module], alphas[module] = target.rank, target.alpha
        if name in adapter.saved:
            (tensors[module + peft.SAVED],) = bound.to_hf([adapter.saved[name]])
            saved_names.append(module.rpartition(".")[2])
    old, new = hf_registry.text_prefixes(hf_tensor_names)
    ranks, alphas, tensors = (with_prefix(names, old, new) for names in (ranks, alphas, tensors))
    every = [*modules.by_hf, *modules.saved_rules]
    if new:  # other parts of a multimodal model have modules of the same last names
        every += [f"vision.{module}" for module in every]
    settings = peft.adapter_settings(
        ranks,
        alphas,
        every,
        base_name,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        lora_dropout=spec.dropout,
        modules_to_save=saved_names or None,
    )
    if adapter.settings:
        original = peft.LoraConfig.from_json(adapter.settings, peft.CONFIG_FILE)
        if all(original.rank(module) == rank for module, rank in ranks.items()):
            settings |= adapter.settings
    return tensors, settings


def with_prefix(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The values with `new` in place of `old` where names start with it."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: value
        for name, value in values.items()
    }


def scales_to_alpha(spec: AdapterSpec, scale: float, rank: int, present: Sequence[str]) -> float:
    """The alpha that gives a scale at a rank; the target's own, if its rank is unchanged."""
    target = spec.by_path[present[0]]
    if target.rank == rank:
        return target.alpha
    return scale * (rank**0.5 if spec.rslora else rank)


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
