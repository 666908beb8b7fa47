"""The linear layers of a model, and the modules and parameters of its Hugging Face model that they
correspond to: by name on both sides.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from maxtext.adapters import peft
from maxtext.adapters.binding import WEIGHT, LinearShape, ModuleRule
from maxtext.adapters.parameters import ParameterRule
from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ParamInfo
from maxtext.common.errors import UserError
from maxtext.common.trees import flatten_dict
from maxtext.configs.sources import suggest
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.bound_rule import BoundRule
from maxtext.layers.adapters import EMBEDDER, HEAD
from maxtext.layers.parameters import Template
from maxtext.models import hf_registry
from maxtext.models.transformer import make_template

ROUTER = "/router"  # the end of the native path of a router
EMBEDDING, HEAD_WEIGHT = f"{EMBEDDER}/embedding", f"{HEAD}{WEIGHT}"


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
    def rules(self) -> list[ModuleRule]:
        """Those of all linear layers. Raises UserError if the family has no HF architecture."""
        shapes = {name: info.shape for name, info in self.param_infos.items()}
        mapping = hf_registry.mapping_for(self.config)
        rules = []
        for rule in hf_registry.rules(mapping, self.config):
            for layer in rule.layers(shapes):
                bound = rule.bind(shapes, layer)
                if bound is None or not all(name.endswith(peft.SAVED) for name in bound.hf_names):
                    continue
                native = tuple(name.removesuffix(WEIGHT) for name in bound.native_names)
                if all(path in self.linears for path in native):
                    hf = tuple(name.removesuffix(peft.SAVED) for name in bound.hf_names)
                    linears = {path: self.linears[path] for path in native}
                    rules.append(ModuleRule(rule, layer, hf, native, linears))
        return rules

    @cached_property
    def parameters(self) -> dict[str, ParameterRule]:
        """Parameters that hold a weight of all experts, by HF name, in the order in which
        transformers' modules have them."""
        shapes = {name: info.shape for name, info in self.param_infos.items()}
        mapping = hf_registry.mapping_for(self.config)
        parameters = {}
        for rule in hf_registry.rules(mapping, self.config):
            for layer in rule.layers(shapes):
                bound = rule.bind(shapes, layer)
                if bound is None or bound.hf_names[0].endswith(peft.SAVED):
                    continue
                native = tuple(name.removesuffix(WEIGHT) for name in bound.native_names)
                if all(path in self.linears for path in native):
                    (name,) = bound.hf_names
                    parameters[name] = ParameterRule(
                        rule,
                        layer,
                        name=name,
                        native=native,
                        shape=self.linears[native[0]],
                        swapped=mapping.peft_swaps_factors,
                    )
        return parameters

    @cached_property
    def parameter_of(self) -> dict[str, ParameterRule]:
        """The parameters of all experts by native layer."""
        return {path: rule for rule in self.parameters.values() for path in rule.native}

    @cached_property
    def parameters_of_module(self) -> dict[str, list[ParameterRule]]:
        """The parameters of all experts by the HF module that has them."""
        by_module: dict[str, list[ParameterRule]] = {}
        for rule in self.parameters.values():
            by_module.setdefault(rule.module, []).append(rule)
        return by_module

    @cached_property
    def expert_modules(self) -> set[str]:
        """HF modules of single experts, which models of transformers 5 lack."""
        return {module for rule in self.rules if rule.stacks_experts for module in rule.hf}

    @cached_property
    def expert_names(self) -> set[str]:
        """The last names of these modules. PEFT takes every target module of such a name for the
        parameters of all experts."""
        return {module.rpartition(".")[2] for module in self.expert_modules}

    @cached_property
    def hf_names(self) -> set[str]:
        """Those of all tensors of the model."""
        shapes = {name: info.shape for name, info in self.param_infos.items()}
        mapping = hf_registry.mapping_for(self.config)
        bound = (
            rule.bind(shapes, layer)
            for rule in hf_registry.rules(mapping, self.config)
            for layer in rule.layers(shapes)
        )
        return {name for rule in bound if rule is not None for name in rule.hf_names}

    @cached_property
    def by_hf(self) -> dict[str, ModuleRule]:
        by_hf: dict[str, ModuleRule] = {}
        for rule in self.rules:
            for module in rule.hf:
                by_hf.setdefault(module, rule)
        return by_hf

    @cached_property
    def by_native(self) -> dict[str, ModuleRule]:
        by_native: dict[str, ModuleRule] = {}
        for rule in self.rules:
            for path in rule.native:
                by_native.setdefault(path, rule)
        return by_native

    def shared_layers(self, targets: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """The layers with adapters that are one HF module, whose A they share. None share if some
        are only a part of their module."""
        try:
            split = [rule for rule in self.rules if len(rule.hf) == 1 and len(rule.native) > 1]
        except UserError:  # the family has no HF architecture
            return ()
        counts = {rule.native: sum(path in targets for path in rule.native) for rule in split}
        if any(0 < count < len(native) for native, count in counts.items()):
            return ()
        return tuple(native for native, count in counts.items() if count)

    @cached_property
    def saved_rules(self) -> dict[str, BoundRule]:
        """The rules of the head and the embedding, by HF module, for copies of them. A tied model
        may have a copy of its head, too."""
        shapes = {name: info.shape for name, info in self.param_infos.items()}
        vocab_size, embed_dim = shapes[EMBEDDING]
        shapes.setdefault(HEAD_WEIGHT, (embed_dim, vocab_size))
        mapping = hf_registry.mapping_for(self.config)
        rules: dict[str, BoundRule] = {}
        for rule in hf_registry.rules(mapping, self.config):
            if rule.native in (EMBEDDING, HEAD_WEIGHT):
                bound = rule.bind(shapes)
                if bound is not None:
                    rules.setdefault(bound.hf_names[0].removesuffix(peft.SAVED), bound)
        return rules

    def resolve_hf(self, selected: Iterable[str]) -> dict[str, ModuleRule]:
        """The native layers of HF modules, which are all known."""
        layers: dict[str, ModuleRule] = {}
        for module in selected:
            rule = self.by_hf[module]
            layers |= dict.fromkeys(rule.native, rule)
        return layers

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
