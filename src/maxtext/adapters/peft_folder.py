"""PEFT folders of adapters, read and written by the bindings of a model.

The tensors of a module have its name, and those of a parameter that of the module with the
parameter. If several parameters of a module have an adapter, the last one has `experts.lora_A`, the
one before `experts.base_layer.lora_A`: PEFT wraps the module once for each.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from maxtext.adapters import peft
from maxtext.adapters.binding import Binding, Factors, ModuleBinding, ParameterBinding
from maxtext.adapters.modules import EMBEDDING, ROUTER, SAVED_MODULES, ModelModules
from maxtext.adapters.spec import MAGNITUDE, A, Adapter, B
from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_folder
from maxtext.checkpoint.tensors import NamedArrays, Shape, TensorInfo, raise_problems
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path, read_json_object
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import HfMapping
from maxtext.layers.adapters import EMBEDDER, AdapterSpec, AdapterTarget
from maxtext.models import hf_registry

EMBEDDING_FACTORS = (peft.EMBEDDING_A, peft.EMBEDDING_B)
# Kinds of tensors that are read together with A of their module, or not at all.
COMPANIONS = (peft.B, peft.MAGNITUDE, peft.EMBEDDING_B, peft.BASE_WEIGHT)
SHARD_BYTES = 5 * 10**9


def nested_names(
    module: str, parameters: Sequence[ParameterBinding]
) -> Iterator[tuple[str, ParameterBinding]]:
    """The names that the tensors of a module's parameters with adapters have, each with its
    parameter; the parameters are given in the order of the module."""
    for depth, binding in enumerate(reversed(parameters)):
        yield module + peft.BASE_LAYER * depth, binding


def read_adapter(folder: str | os.PathLike, config: MaxTextConfig) -> Adapter:
    """Read a PEFT folder for the model of a configuration. Raises ConfigError for adapters that are
    not supported, and UserError if tensors do not fit the model."""
    path = local_path(folder)
    if not peft.is_adapter_folder(path):
        raise ConfigError(f"{path} has no {peft.CONFIG_FILE}: it is no PEFT adapter")
    settings = read_json_object(path / peft.CONFIG_FILE)
    lora = peft.LoraConfig.from_json(settings, str(path / peft.CONFIG_FILE))
    source = SafetensorsFolder.open(path, peft.TENSORS_STEM)
    modules = ModelModules.of(config)
    names = canonical_tensors(source, modules.mapping)
    return AdapterReader(modules, lora, names, source).read(settings)


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
    """Reads the tensors of a PEFT folder, all problems in one error. Factors are read by binding,
    each with the names of its tensors in the folder, of which at least one is there."""

    modules: ModelModules
    lora: peft.LoraConfig
    names: Mapping[str, str]
    source: SafetensorsFolder
    targets: dict[str, AdapterTarget] = field(default_factory=dict)  # by native layer
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, settings: Json) -> Adapter:
        modules: dict[ModuleBinding, list[str]] = {}
        experts: dict[str, list[str]] = {}
        outer: dict[str, list[str]] = {peft.EMBEDDING_A: [], peft.SAVED: []}
        problems: list[str] = []
        for name in self.names:
            module, kind = split_name(name)
            if kind in COMPANIONS:
                continue
            if kind == peft.A and peft.owner(module) in self.modules.of_parameters:
                experts.setdefault(peft.owner(module), []).append(module)
            elif kind == peft.A and module in self.modules.by_hf:
                modules.setdefault(self.modules.by_hf[module], []).append(module)
            elif kind in outer and module in self.modules.saved_rules:
                outer[kind].append(module)
            else:
                problems.append(f"{self.names[name]} {self.misfit(module, kind)}")
        for binding, present in modules.items():
            problems += self.module_problems(binding, present)
        targets: list[tuple[Binding, list[str]]] = list(modules.items())
        for module, present in experts.items():
            selected = self.select_parameters(module, present)
            problems += self.parameter_problems(module, present, selected)
            targets += [(binding, [name]) for name, binding in selected.items()]
        changed = [module for kind in outer.values() for module in kind]
        is_tied = self.modules.config.logits_via_embedding
        if settings.get("ensure_weight_tying") and is_tied and changed:
            problems.append(
                f"ensure_weight_tying=true changes the head together with {changed[0]}, which is "
                "not supported"
            )
        raise_problems(self.source.title, problems)
        for target, present in targets:
            self.read_binding(target, present)
        for module in outer[peft.EMBEDDING_A]:
            self.read_embedding(module)
        saved = dict(self.read_saved(module) for module in outer[peft.SAVED])
        spec = AdapterSpec(
            targets=tuple(sorted(self.targets.items())),
            rslora=self.lora.use_rslora,
            dora=self.lora.use_dora,
            dropout=self.lora.lora_dropout,
            saved=tuple(SAVED_MODULES[name] for name in saved),
            shared=self.modules.shared_layers(self.targets),
        )
        return Adapter(spec, self.tensors, saved, dict(settings))

    # Checks.

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

    def module_problems(self, binding: ModuleBinding, present: Sequence[str]) -> Iterator[str]:
        """Problems with the tensors of the modules of a binding."""
        if binding.stacks_experts and len(present) < len(binding.hf):
            missing = next(module for module in binding.hf if module not in present)
            yield f"{missing}{peft.A} is missing: all experts must have an adapter"
            return
        for module in present:
            rank = self.lora.rank(self.pattern_name(binding, module))
            a_shape, b_shape = binding.hf_shapes(rank)[binding.hf.index(module)]
            expected: dict[str, Shape] = {peft.A: a_shape, peft.B: b_shape}
            if self.lora.use_dora:
                expected[peft.MAGNITUDE] = b_shape[:1]
            for kind, shape in expected.items():
                name = module + kind
                if name not in self.names:
                    yield f"{peft.PREFIX}{name} is missing"
                elif self.info(name).shape != shape:
                    yield (
                        f"{self.names[name]} has shape {list(self.info(name).shape)}, the model "
                        f"and {peft.CONFIG_FILE} need {list(shape)}"
                    )

    def select_parameters(self, module: str, present: Sequence[str]) -> dict[str, ParameterBinding]:
        """The parameters of a module of experts that are targets, by the names of their tensors, of
        which `present` are in the folder."""
        selected = [
            binding
            for binding in self.modules.of_parameters[module]
            if self.lora.selects_parameter(self.pattern_name(binding, present[0]))
        ]
        return dict(nested_names(module, selected))

    def parameter_problems(
        self, module: str, present: Sequence[str], selected: Mapping[str, ParameterBinding]
    ) -> Iterator[str]:
        """Problems with the tensors of a module of experts."""
        if selected.keys() != set(present):
            names = [binding.last_name for binding in self.modules.of_parameters[module]]
            yield (
                f"{peft.PREFIX}{module} has adapters of {len(present)} parameters, and "
                f"target_parameters={list(self.lora.target_parameters)} selects {len(selected)} of "
                f"{', '.join(names)}"
            )
            return
        for name, binding in selected.items():
            if name + peft.B not in self.names:
                yield f"{peft.PREFIX}{name}{peft.B} is missing"
                continue
            rank = self.lora.rank(self.pattern_name(binding, name))
            a, b = (self.info(name + kind).shape for kind in (peft.A, peft.B))
            if binding.is_swapped(a, b, rank) is None:
                ((a_shape, b_shape),) = binding.hf_shapes(rank)
                yield (
                    f"{binding.hf[0]} has factors {list(a)} and {list(b)}, the model and "
                    f"{peft.CONFIG_FILE} need {list(a_shape)} and {list(b_shape)}"
                )

    # Reading.

    def read_binding(self, binding: Binding, present: Sequence[str]) -> None:
        """Read the factors of the targets of a binding; modules of a packed layer that lack an
        adapter have zeros."""
        patterns = [self.pattern_name(binding, name) for name in present]
        scales = {(self.lora.rank(name), self.lora.alpha(name)) for name in patterns}
        if len(scales) > 1:
            raise ConfigError(
                f"{self.source.title}: {', '.join(present)} are one layer here, and have ranks or "
                "alphas that differ"
            )
        ((rank, alpha),) = scales
        names = binding.hf if isinstance(binding, ModuleBinding) else present
        factors = [self.factors(binding, name, like=present[0]) for name in names]
        for path, (a, b) in binding.to_native(factors).items():
            # A rank other than in the folder, at the same scale.
            factor = a.shape[-1] / rank
            scaled = alpha * (factor**0.5 if self.lora.use_rslora else factor)
            self.add(path, (a, b), AdapterTarget(a.shape[-1], scaled))
        if self.lora.use_dora and isinstance(binding, ModuleBinding):
            self.read_magnitudes(binding, present)

    def factors(self, binding: Binding, name: str, like: str) -> Factors:
        """A and B of a target; zeros if only other targets of its binding, as `like`, have an
        adapter."""
        if name + peft.A in self.names:
            a, b = (self.source.read(self.names[name + kind]) for kind in (peft.A, peft.B))
            return a, b
        a_info = self.info(like + peft.A)
        a_shape, b_shape = binding.hf_shapes(a_info.shape[0])[binding.hf.index(name)]
        return np.zeros(a_shape, a_info.dtype), np.zeros(b_shape, self.info(like + peft.B).dtype)

    def read_magnitudes(self, binding: ModuleBinding, present: Sequence[str]) -> None:
        if binding.stacks_experts:
            raise ConfigError(f"{self.source.title}: DoRA of experts is not supported")
        missing = [module for module in binding.hf if module + peft.MAGNITUDE not in self.names]
        if missing:
            raise ConfigError(
                f"{self.source.title}: {missing[0]} and {present[0]} are one layer here, and DoRA "
                "needs an adapter of both"
            )
        names = [self.names[module + peft.MAGNITUDE] for module in binding.hf]
        magnitudes = binding.magnitudes_to_native([self.source.read(name) for name in names])
        self.tensors.update({f"{path}/{MAGNITUDE}": m for path, m in magnitudes.items()})

    def add(self, path: str, factors: Factors, target: AdapterTarget) -> None:
        self.targets[path] = target
        self.tensors[f"{path}/{A}"], self.tensors[f"{path}/{B}"] = factors

    def pattern_name(self, binding: Binding, name: str) -> str:
        """The name that patterns of ranks and alphas match for the target whose tensors have this
        name: of the module, of its weight if that is the target, or of the parameter, in the model
        that the folder is for, which may be multimodal."""
        in_folder = self.names[name + peft.A].removeprefix(peft.PREFIX).removesuffix(peft.A)
        if isinstance(binding, ParameterBinding):
            return f"{peft.owner(in_folder)}.{binding.last_name}"
        return self.lora.target(in_folder)

    def info(self, name: str) -> TensorInfo:
        return self.source.tensors[self.names[name]]

    def read_embedding(self, module: str) -> None:
        if self.modules.saved_rules[module].native_names[0] != EMBEDDING or self.lora.use_dora:
            raise ConfigError(
                f"{self.source.title}: DoRA of embeddings, and embedding adapters of {module}, are "
                "not supported"
            )
        a, b = (self.source.read(self.names[module + kind]) for kind in EMBEDDING_FACTORS)
        rank, shape = self.lora.rank(module), self.modules.param_infos[EMBEDDING].shape
        if a.shape != (rank, shape[0]) or b.shape != (shape[1], rank):
            raise UserError(
                f"{self.source.title} does not fit the model: {module} has factors "
                f"{list(a.shape)} and {list(b.shape)}, and the embedding is {list(shape)}"
            )
        factors = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        self.add(EMBEDDER, factors, AdapterTarget(rank, self.lora.alpha(module)))

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
    for kind in (peft.A, peft.EMBEDDING_A, *COMPANIONS, peft.SAVED):
        if name.endswith(kind):
            return name.removesuffix(kind), kind
    return name, ""


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
    arrays = {peft.PREFIX + name: array for name, array in tensors.items()}
    write_folder(
        folder, NamedArrays(arrays, "the adapter"), peft.TENSORS_STEM, texts, {}, SHARD_BYTES
    )


def to_peft(
    adapter: Adapter,
    modules: ModelModules,
    base_name: str,
    hf_tensor_names: Collection[str] = (),
) -> tuple[dict[str, np.ndarray], Json]:
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
    # By target: a module, or a parameter, which is also in `parameters`.
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    saved_names: list[str] = field(default_factory=list)

    @property
    def spec(self) -> AdapterSpec:
        return self.adapter.spec

    @cached_property
    def original(self) -> peft.LoraConfig | None:
        """The settings of the folder that the adapter was read from."""
        if not self.adapter.settings:
            return None
        return peft.LoraConfig.from_json(self.adapter.settings, peft.CONFIG_FILE)

    def write(self, base_name: str) -> tuple[dict[str, np.ndarray], Json]:
        paths = self.spec.by_path.keys() - {EMBEDDER}
        in_parameters: set[str] = set()
        named_parameters: list[tuple[str, ParameterBinding]] = []
        for module, parameters in self.modules.of_parameters.items():
            written = [
                binding
                for binding in parameters
                if self.is_parameter(binding) and paths & set(binding.native)
            ]
            in_parameters.update(path for binding in written for path in binding.native)
            named_parameters += nested_names(module, written)
        in_modules = {self.modules.by_native[path] for path in paths - in_parameters}
        for binding in self.modules.of_modules:
            if binding in in_modules:
                self.add(binding, [self.module_names(module) for module in binding.hf])
                self.add_magnitudes(binding)
        for name, parameter in named_parameters:
            target = self.folder_name(parameter.hf[0], renamed=True)
            self.add(parameter, [(self.folder_name(name, renamed=True), target)])
            self.parameters.add(target)
        self.add_outer_modules()
        return self.tensors, self.settings(base_name)

    def folder_name(self, name: str, renamed: bool = False) -> str:
        """A name of a tensor, module or parameter in the folder; `renamed`, as transformers 5 has
        it, where that differs from the base's folder."""
        old, new = self.prefixes
        if name.startswith(old):
            name = new + name.removeprefix(old)
        name_in_rules, name_in_module = self.modules.mapping.module_renaming
        if renamed and name_in_rules:
            name = name.replace(name_in_rules, name_in_module)
        return name

    def is_parameter(self, binding: ParameterBinding) -> bool:
        """Whether all experts of a layer are written as one parameter."""
        if self.spec.dora:
            return False
        if self.original is None:
            return True
        return self.original.selects_parameter(self.folder_name(binding.hf[0], renamed=True))

    def module_names(self, module: str) -> tuple[str, str]:
        """The name of a module's tensors, and of the target: the module or, as a parameter, its
        weight."""
        name = self.folder_name(module, renamed=True)
        target = name + peft.SAVED
        if self.original is not None:
            is_parameter = self.original.selects_parameter(target)
        else:
            is_router = self.modules.by_hf[module].native[0].endswith(ROUTER)
            is_ambiguous = module.rpartition(".")[2] in self.modules.expert_names
            is_parameter = (is_router or is_ambiguous) and not self.spec.dora
        if not is_parameter:
            name = target = self.folder_name(module)
        else:
            self.parameters.add(target)
        return name, target

    def add(self, binding: Binding, names: Sequence[tuple[str, str]]) -> None:
        """Add the factors of a binding; `names` are those of the tensors and of the target, for
        each of its targets."""
        present = [path for path in binding.native if path in self.spec.by_path]
        targets = [self.spec.by_path[path] for path in present]
        scales = {self.spec.scale(target) for target in targets}
        if len(scales) > 1:
            noun = "parameter" if isinstance(binding, ParameterBinding) else "module"
            raise ConfigError(f"{', '.join(present)} have different scales, and are one HF {noun}")
        factors = binding.to_hf({path: self.adapter.factors(path) for path in present})
        for (name, target), (a, b) in zip(names, factors, strict=True):
            self.tensors |= {name + peft.A: a, name + peft.B: b}
            rank = self.ranks[target] = binding.rank(a)
            # The target's own alpha, if its rank is unchanged.
            alpha = scales.copy().pop() * (rank**0.5 if self.spec.rslora else rank)
            self.alphas[target] = targets[0].alpha if targets[0].rank == rank else alpha

    def add_magnitudes(self, binding: ModuleBinding) -> None:
        if not self.spec.dora:
            return
        names = {path: f"{path}/{MAGNITUDE}" for path in binding.native}
        tensors = self.adapter.tensors
        magnitudes = {path: tensors[name] for path, name in names.items() if name in tensors}
        for module, array in zip(binding.hf, binding.magnitudes_to_hf(magnitudes), strict=True):
            self.tensors[self.folder_name(module) + peft.MAGNITUDE] = array

    def add_outer_modules(self) -> None:
        """Add the embedding and the head, which may be saved in full."""
        for module, bound in self.modules.saved_rules.items():
            name, native = self.folder_name(module), bound.native_names[0]
            if native == EMBEDDING and EMBEDDER in self.spec.by_path:
                factors = self.adapter.factors(EMBEDDER)
                for kind, factor in zip(EMBEDDING_FACTORS, factors, strict=True):
                    self.tensors[name + kind] = np.ascontiguousarray(factor.T)
                target = self.spec.by_path[EMBEDDER]
                self.ranks[name], self.alphas[name] = target.rank, target.alpha
            if native in self.adapter.saved:
                (self.tensors[name + peft.SAVED],) = bound.to_hf([self.adapter.saved[native]])
                self.saved_names.append(module.rpartition(".")[2])

    def settings(self, base_name: str) -> Json:
        """The adapter_config.json."""
        every = [
            self.folder_name(name) for name in (*self.modules.by_hf, *self.modules.saved_rules)
        ]
        expert_tensors = {module + peft.SAVED for module in self.modules.expert_modules}
        names = self.modules.hf_names - expert_tensors
        parameters = [self.folder_name(name, renamed=True) for name in names]
        if self.prefixes[1]:
            # Other parts of a multimodal model have modules of the same last names.
            every += [f"vision.{module}" for module in every]
            parameters += [f"vision.{name}" for name in parameters]
        settings = peft.adapter_settings(
            self.ranks,
            self.alphas,
            every,
            base_name,
            parameters={name: name in self.parameters for name in parameters},
            use_rslora=self.spec.rslora,
            use_dora=self.spec.dora,
            # PEFT has no dropout of parameters.
            lora_dropout=0.0 if self.parameters else self.spec.dropout,
            modules_to_save=self.saved_names or None,
            task_type="SEQ_CLS" if self.modules.config.num_labels else "CAUSAL_LM",
        )
        original = self.original
        if original and all(original.rank(name) == rank for name, rank in self.ranks.items()):
            settings |= self.adapter.settings
        return settings
