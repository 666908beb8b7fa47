"""Every spec names a module that can build it."""

import inspect

import pytest

import maxtext.models.registry  # noqa: F401  # the families define specs of their own
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.specs import ACTIVATION_NAMES, MixerSpec, Spec


def spec_types(base: type[Spec]) -> list[type[Spec]]:
    subclasses = [spec for child in base.__subclasses__() for spec in (child, *spec_types(child))]
    return [spec for spec in subclasses if spec.__module__.startswith("maxtext.")]


@pytest.mark.parametrize(
    "spec_type",
    [spec for spec in spec_types(Spec) if spec is not MixerSpec],
    ids=lambda spec: spec.__name__,
)
def test_module_of_a_spec_builds_it(spec_type):
    module = spec_type.import_module()
    first, second, *_ = inspect.signature(module.build).parameters.values()
    assert first.annotation is spec_type
    assert second.name == "initializer"
    if issubclass(spec_type, MixerSpec):
        assert list(inspect.signature(module.empty_cache).parameters) == ["spec", "cache_config"]


def test_names_of_activations_are_those_of_the_functions():
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES
