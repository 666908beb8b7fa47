"""The base classes of layer specs.

A spec is a frozen dataclass that describes a layer. It imports no JAX, so that configurations are
resolved, checked against their layers and compared without it.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from maxtext.layers.cache import CacheConfig
    from maxtext.layers.parameters import Initializer

# Metadata of a field that chooses how a layer computes its output, or that only training uses:
# specs that differ in such fields alone compute the same from the same weights.
IMPLEMENTATION = {"affects_output": False}


class Spec:
    """`module` names the Python module that creates the layer, by its `build(spec, initializer,
    ...)`. It imports JAX, so it is imported when the first layer is built.
    """

    module: ClassVar[str]

    @classmethod
    def import_module(cls) -> ModuleType:
        return importlib.import_module(cls.module)

    def build(self, initializer: "Initializer", *args: Any) -> Any:
        return self.import_module().build(self, initializer, *args)


class MixerSpec(Spec):
    """A token mixer. `empty_cache(spec, cache_config)` of its module creates the cache."""

    def cache(self, cache_config: "CacheConfig") -> Any:
        """An empty cache; None if the layer needs all tokens anew."""
        return self.import_module().empty_cache(self, cache_config)
