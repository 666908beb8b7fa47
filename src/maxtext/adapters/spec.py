"""Adapters (LoRA): their specification from configuration keys, and their parameters in the tree of
a model. `peft_folder.py` reads and writes folders of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from maxtext.adapters import peft
from maxtext.adapters.binding import Factors, padded
from maxtext.adapters.modules import ROUTER, ModelModules
from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, ParamInfo, ParamPath
from maxtext.common.errors import ConfigError
from maxtext.common.trees import unflatten_dict
from maxtext.common.types import Json, Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import HEAD, AdapterSpec, AdapterTarget
from maxtext.layers.lora import is_adapter
from maxtext.layers.parameters import Template

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
DEFAULT_TARGETS = (
    r"layers/\d+/attention/(query|key|value|qkv|out|query_a|query_b|kv_a|kv_b)"
    r"|layers/\d+/mlp/(shared/)?(wi|wi_0|wi_1|wo)"
)
ROUTED_EXPERTS = "/experts/"


def adapter_spec(config: MaxTextConfig) -> AdapterSpec | None:
    """The adapters that the lora_* keys describe; None if lora_rank is 0.

    Targets are the layers whose native path `lora_module_path` fully matches, or those of the HF
    modules that `lora_target_modules` selects by PEFT's rules, or by default the projections of
    attention and MLPs, with shared experts but without routed ones. Raises ConfigError if nothing
    is selected.
    """
    if not config.lora_rank:
        return None
    modules = ModelModules.of(config)
    if config.lora_module_path and config.lora_target_modules:
        raise ConfigError("set lora_module_path or lora_target_modules, not both")
    if config.lora_target_modules:
        paths = select_hf(modules, config.lora_target_modules)
    else:
        paths = select_native(modules, config.lora_module_path)
    routed = [path for path in paths if is_routed(path)]
    if config.lora_use_dora and routed:
        raise ConfigError(
            f"lora_use_dora=true has no magnitudes for routed experts and routers such as "
            f"{routed[0]}: leave them out of the targets, or set lora_use_dora=false"
        )
    saved = (HEAD,) if config.num_labels else ()  # a reward model's head is new
    paths = [path for path in paths if path not in saved]
    target = AdapterTarget(config.lora_rank, config.lora_alpha or float(config.lora_rank))
    return AdapterSpec(
        targets=tuple((path, target) for path in paths),
        rslora=config.lora_use_rslora,
        dora=config.lora_use_dora,
        dropout=config.lora_dropout,
        init=config.lora_init,
        saved=saved,
        shared=modules.shared_layers(paths),
    )


def is_routed(path: str) -> bool:
    """Whether a native layer is of routed experts, or a router."""
    return ROUTED_EXPERTS in path or path.endswith(ROUTER)


def select_native(modules: ModelModules, pattern: str) -> list[str]:
    """The linear layers whose path the pattern matches fully, or the default targets."""
    try:
        expression = re.compile(pattern or DEFAULT_TARGETS)
    except re.error as error:
        raise ConfigError(f"lora_module_path={pattern!r} is not a pattern: {error}") from error
    paths = [path for path in modules.linears if expression.fullmatch(path)]
    if not paths:
        examples = sorted({re.sub(r"\d+", "0", path) for path in modules.linears})
        raise ConfigError(
            f"lora_module_path={pattern!r} matches no layer; the paths are {', '.join(examples)}"
        )
    return paths


def select_hf(modules: ModelModules, targets: str | Sequence[str]) -> list[str]:
    """The linear layers of the HF modules that PEFT's target_modules select."""
    if targets == peft.ALL_LINEAR:
        return [path for path in modules.linears if path != HEAD and not is_routed(path)]
    try:
        settings = peft.LoraConfig(r=1, lora_alpha=1, target_modules=targets)
        selected = [module for module in modules.by_hf if settings.selects(module)]
    except re.error as error:
        raise ConfigError(f"lora_target_modules={targets!r} is not a pattern: {error}") from error
    unused = [] if isinstance(targets, str) else unmatched(targets, selected)
    if not selected or unused:
        names = unused or targets
        raise ConfigError(
            f"lora_target_modules={names!r} selects no module{modules.near_names(names)}"
        )
    chosen = {path for module in selected for path in modules.by_hf[module].native}
    return [path for path in modules.linears if path in chosen]


def unmatched(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    return [
        name for name in names if not any(peft.matches_names([name], module) for module in modules)
    ]


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of a model: the factors of each native layer by name, as
    "layers/3/attention/query/lora_a", in the dtype of the folder that they came from."""

    spec: AdapterSpec
    tensors: Mapping[str, np.ndarray]  # by native name
    # Weights that replace those of the base (modules_to_save), by native name
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Json = field(default_factory=dict)  # adapter_config.json, if known

    @classmethod
    def from_tree(
        cls, spec: AdapterSpec, tree: Tree, template: Template, config: MaxTextConfig
    ) -> "Adapter":
        """From the weights of a model with adapters, of which only those of the adapters, and of
        modules that are saved in full, are read. `template` is of the model with adapters."""
        infos = model_param_infos(template, config)
        names = [name for name in infos if is_adapter(infos[name].path)]
        weights = ModelWeights(tree, {name: infos[name] for name in names})
        modules = ModelModules.of(config)
        tensors = {}
        for name in names:
            path, _, kind = name.rpartition("/")
            target = spec.by_path.get(path)
            if target is None:
                continue
            array = weights.read(name)
            if kind == A:
                array = array[..., : target.rank]
            elif kind == B:
                batch = len(modules.linears[path].batch) if path in modules.linears else 0
                array = array[(slice(None),) * batch + (slice(target.rank),)]
            tensors[name] = array
        saved_infos = {name: infos[name] for name in infos if spec.saves(name)}
        saved = dict(iter(ModelWeights(tree, saved_infos)))
        return cls(spec, tensors, saved)

    def tree(self, template: Template, config: MaxTextConfig) -> Tree:
        """The parameters of the adapter in a model that is built with its spec, on the host, and
        the weights that it saved in full. Layers without an adapter, and ranks below the largest of
        a stack, are padded with zeros. Raises ConfigError if the model lacks a saved weight."""
        infos = model_param_infos(template, config)
        leaves: dict[ParamPath, np.ndarray] = {}
        shapes = {info.path: info for name, info in infos.items() if is_adapter(info.path)}
        for name, info in infos.items():
            if info.path not in shapes:
                continue
            array = self.tensors.get(name, np.zeros(0, info.dtype))
            layer = padded(array.astype(info.dtype), info.shape, info.dtype)
            write_layer(leaves, info, layer, infos)
        for name, array in self.saved.items():
            if name not in infos:
                raise ConfigError(
                    f"the adapter has a {name} of its own, and the head of this model is its "
                    "embedding: such an adapter can be served, but not trained"
                )
            leaves[infos[name].path] = array.astype(infos[name].dtype)
        return unflatten_dict(leaves)

    def factors(self, path: str) -> Factors:
        """lora_a and lora_b of a native layer."""
        return self.tensors[f"{path}/{A}"], self.tensors[f"{path}/{B}"]


def write_layer(
    leaves: dict[ParamPath, np.ndarray],
    info: ParamInfo,
    layer: np.ndarray,
    infos: Mapping[str, ParamInfo],
) -> None:
    """Write the parameter of one layer to its leaf, which may be stacked."""
    if info.stack_index is None:
        leaves[info.path] = layer
        return
    if info.path not in leaves:
        count = sum(other.path == info.path for other in infos.values())
        axis = info.stack_axis
        shape = (*info.shape[:axis], count, *info.shape[axis:])
        leaves[info.path] = np.zeros(shape, layer.dtype)
    np.moveaxis(leaves[info.path], info.stack_axis, 0)[info.stack_index] = layer
