"""The linear layers of a model, and the modules and parameters of its Hugging Face model that they
correspond to: by name on both sides. Reading, writing and selecting adapters walk over these.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from maxtext.adapters import peft
from maxtext.adapters.binding import WEIGHT, Binding, LinearShape, ModuleBinding, ParameterBinding
from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ParamInfo
from maxtext.common.errors import UserError
from maxtext.common.trees import flatten_dict
from maxtext.configs.sources import suggest
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import HfMapping
from maxtext.hf.rules import BoundRule, TensorRule
from maxtext.layers.adapters import EMBEDDER, HEAD
from maxtext.layers.parameters import Template
from maxtext.models import hf_registry
from maxtext.models.transformer import make_template

ROUTER = "/router"  # the end of the native path of a router
EMBEDDING, HEAD_WEIGHT = f"{EMBEDDER}/embedding", f"{HEAD}{WEIGHT}"
# Weights that adapters may save in full, and their modules
SAVED_MODULES = {HEAD_WEIGHT: HEAD, EMBEDDING: EMBEDDER}


@dataclass(frozen=True)
class ModelModules:
    """The linear layers of a model, by native path, and the HF modules that they come from."""

    config: MaxTextConfig
    param_infos: Mapping[str, ParamInfo]
    linears: Mapping[str, LinearShape]

    @classmethod
    def of(cls, config: MaxTextConfig) -> "ModelModules":
        template = make_template(config)
        param_infos = model_param_infos(template, config)
        return cls(config, param_infos, linear_shapes(template, param_infos))

    @cached_property
    def mapping(self) -> HfMapping:
        """Raises UserError if the family has no HF architecture."""
        return hf_registry.mapping_for(self.config)

    @cached_property
    def bound_rules(self) -> list[tuple[TensorRule, int | None, BoundRule]]:
        """All tensor rules of the model, each with a layer. A tied model also has one of its head,
        for adapters with a copy of it."""
        rules = hf_registry.rules(self.mapping, self.config)
        shapes = {name: info.shape for name, info in self.param_infos.items()}
        shapes.setdefault(HEAD_WEIGHT, shapes[EMBEDDING][::-1])
        bound = ((rule, i, rule.bind(shapes, i)) for rule in rules for i in rule.layers(shapes))
        return [(rule, layer, each) for rule, layer, each in bound if each is not None]

    @cached_property
    def bindings(self) -> list[Binding]:
        """The bindings of all linear layers, in the order of transformers' modules. A
        layer of experts may have two: its modules, and a parameter."""
        bindings: list[Binding] = []
        for rule, layer, bound in self.bound_rules:
            native = tuple(name.removesuffix(WEIGHT) for name in bound.native_names)
            if not all(path in self.linears for path in native):
                continue
            shapes = {path: self.linears[path] for path in native}
            if all(name.endswith(peft.SAVED) for name in bound.hf_names):
                hf = tuple(name.removesuffix(peft.SAVED) for name in bound.hf_names)
                bindings.append(ModuleBinding(rule, layer, hf, native, shapes))
            elif not bound.hf_names[0].endswith(peft.SAVED):
                swapped = self.mapping.peft_swaps_factors
                bindings.append(
                    ParameterBinding(rule, layer, bound.hf_names, native, shapes, swapped)
                )
        return bindings

    @cached_property
    def of_modules(self) -> list[ModuleBinding]:
        return [binding for binding in self.bindings if isinstance(binding, ModuleBinding)]

    @cached_property
    def of_parameters(self) -> dict[str, list[ParameterBinding]]:
        """The parameters of all experts by the HF module that has them."""
        by_module: dict[str, list[ParameterBinding]] = {}
        for binding in self.bindings:
            if isinstance(binding, ParameterBinding):
                by_module.setdefault(binding.module, []).append(binding)
        return by_module

    @cached_property
    def by_hf(self) -> dict[str, ModuleBinding]:
        # The first binding of a name counts.
        return {module: each for each in reversed(self.of_modules) for module in each.hf}

    @cached_property
    def by_native(self) -> dict[str, ModuleBinding]:
        return {path: each for each in reversed(self.of_modules) for path in each.native}

    @cached_property
    def expert_modules(self) -> set[str]:
        """HF modules of single experts, which models of transformers 5 lack."""
        return {module for each in self.of_modules if each.stacks_experts for module in each.hf}

    @cached_property
    def expert_names(self) -> set[str]:
        """The last names of these modules. PEFT takes every target module of such a name for the
        parameters of all experts."""
        return {module.rpartition(".")[2] for module in self.expert_modules}

    @cached_property
    def hf_names(self) -> set[str]:
        """The Hugging Face names of all tensors of the model."""
        return {name for _, _, bound in self.bound_rules for name in bound.hf_names}

    @cached_property
    def saved_rules(self) -> dict[str, BoundRule]:
        """The rules of the head and the embedding, by HF module, for copies of them."""
        rules: dict[str, BoundRule] = {}
        for _, _, bound in self.bound_rules:
            if bound.native_names in ((EMBEDDING,), (HEAD_WEIGHT,)):
                rules.setdefault(bound.hf_names[0].removesuffix(peft.SAVED), bound)
        return rules

    def shared_layers(self, targets: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """The layers with adapters that are one HF module, whose A they share. None share if some
        are only a part of their module."""
        try:
            bindings = self.of_modules
        except UserError:  # the family has no HF architecture
            return ()
        split = (each.native for each in bindings if len(each.hf) == 1 and len(each.native) > 1)
        counts = {native: sum(path in targets for path in native) for native in split}
        if any(0 < count < len(native) for native, count in counts.items()):
            return ()
        return tuple(native for native, count in counts.items() if count)

    def near_names(self, wanted: str | Sequence[str]) -> str:
        """For an error: names that are similar to those that select nothing."""
        modules = sorted({module.rpartition(".")[2] for module in self.by_hf})
        text = wanted if isinstance(wanted, str) else ", ".join(wanted)
        return suggest(text, modules) or f"; the modules are {', '.join(modules)}"


def linear_shapes(
    template: Template, param_infos: Mapping[str, ParamInfo]
) -> dict[str, LinearShape]:
    """The linear layers, experts and routers of a model by native path: weights whose matmul
    contracts known dimensions."""
    contracted = flatten_dict(template.contracted)
    shapes = {}
    for name, info in param_infos.items():
        if name.endswith(ROUTER + WEIGHT):  # never quantized, so that its template does not say
            shapes[name.removesuffix(WEIGHT)] = LinearShape((), info.shape[:1], info.shape[1:])
            continue
        dims = contracted[info.path]
        if not dims or not name.endswith(WEIGHT):
            continue
        if info.stack_index is not None:
            dims = tuple(dim - (dim > info.stack_axis) for dim in dims)
        first, last = min(dims), max(dims) + 1
        shape = info.shape
        shapes[name.removesuffix(WEIGHT)] = LinearShape(
            shape[:first], shape[first:last], shape[last:]
        )
    return shapes
