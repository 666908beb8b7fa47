"""Targets by name: their devices, and the errors for unknown names."""

import importlib.util
import math
import platform

import jax
import pytest

from maxtext.common.errors import ConfigError, MissingExtra
from maxtext.common.hardware import GIB
from maxtext.sharding import topology
from maxtext.sharding.topology import find_target

# name -> libtpu's name, devices, GiB of each: from the vendor's documentation
TARGETS = {
    "v5p:4x4x4": ("v5p:4x4x4", 64, 95),
    "v5p-128": ("v5p:4x4x4", 64, 95),  # cores, two per chip
    "v5p-8": ("v5p:2x2x1", 4, 95),
    "V5P-12288": ("v5p:16x16x24", 6144, 95),
    "v4-8": ("v4:2x2x1", 4, 32),
    "v4-4096": ("v4:8x16x16", 2048, 32),
    "v5e-256": ("v5e:16x16", 256, 16),  # chips
    "v5litepod-8": ("v5e:2x4", 8, 16),
    "v6e-256": ("v6e:16x16", 256, 32),
    "v6e:4x8": ("v6e:4x8", 32, 32),
    "tpu7x-8": ("tpu7x:2x2x1", 8, 96),  # cores, each of which is a device
}


@pytest.mark.parametrize("name", TARGETS)
def test_tpu_slices_by_name(name):
    topology, count, memory = TARGETS[name]
    target = find_target(name)
    assert (target.platform, target.topology, target.count, target.slices) == (
        "tpu",
        topology,
        count,
        1,
    )
    assert target.memory_bytes == memory * GIB


def test_several_slices():
    target = find_target("v5e-16", slices=3)
    assert (target.devices_per_slice, target.slices, target.count) == (16, 3, 48)
    with pytest.raises(ConfigError, match="only TPU targets have slices"):
        find_target("cpu", slices=2)


def test_shapes_have_their_number_of_chips():
    for table in (topology.SHAPES_2D, topology.SHAPES_3D):
        for chips, shape in table.items():
            assert math.prod(map(int, shape.split("x"))) == chips
    assert len(topology.target_names()) == len(set(topology.target_names()))
    for name in topology.target_names()[2:]:
        assert find_target(name).count > 0


def test_default_target_is_this_machine():
    target = find_target()
    assert (target.count, target.kind) == (len(jax.devices()), jax.devices()[0].device_kind)
    assert list(target.devices()) == jax.devices()
    processor = find_target("cpu")
    assert processor.memory_bytes * processor.count == pytest.approx(
        topology.hardware.host_memory_bytes(), rel=1e-6
    )


BAD = {
    "v5q-128": "unknown target 'v5q-128': .* similar names are .*v5.-128",
    "v5p-100": "the named sizes of v5p are 8, 16, 32, .*with its shape, such as v5p:",
    "v5e-512": "the named sizes of v5e are 1, 4, 8, .*256;",
    "v5p:4x4": "a slice of v5p has 3 dimensions",
    "v6e:2x2x2": "a slice of v6e has 2 dimensions",
    "v5p:0x4x4": "3 dimensions",
    "cpu:x": "unknown target 'cpu:x'",
    "abacus": "unknown target 'abacus': .*for example v5p-128",
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_unknown_names(name):
    with pytest.raises(ConfigError, match=BAD[name]) as caught:
        find_target(name)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_rejects_gpu_without_one():
    with pytest.raises(ConfigError, match="this machine has no GPU that JAX can use"):
        find_target("gpu")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_names_the_extra_without_libtpu(monkeypatch):
    target = find_target("v5p-8")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(
        MissingExtra, match=r'v5p-8 .*needs the package .libtpu.*pip install -e .*\[tpu\]"'
    ):
        target.devices()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(
        MissingExtra,
        match="libtpu, which exists for x86-64 Linux only, not for .* aarch64.*--no-comp",
    ):
        target.devices()


def test_slices_smaller_than_a_host_set_chips_per_host():
    assert topology.topology_options(find_target("v5e-1")) == {"chips_per_host_bounds": [1, 1, 1]}
    assert topology.topology_options(find_target("v5e-8", 2)) == {"num_slices": 2}
    assert topology.topology_options(find_target("v5p-8")) == {}
