"""Checkpoints whose parameters have their former names are read under the current ones."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext.checkpoint import state
from maxtext.checkpoint.local_checkpoints import LocalCheckpointManager
from maxtext.checkpoint.manager import StorageOptions
from maxtext.checkpoint.open import under_current_names
from maxtext.checkpoint.quantized import QuantizedFolder
from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_native_folder
from maxtext.checkpoint.saved_step import SavedStep
from maxtext.checkpoint.state import current_name, match_names
from maxtext.checkpoint.tensors import TensorInfo

FORMER = {"mlp": {"kernel": np.arange(6.0).reshape(2, 3)}, "norm": {"scale": np.ones(3)}}


@pytest.fixture(autouse=True)
def renamed_component(monkeypatch):
    """A rename of its own, so that these tests hold whatever the table says."""
    monkeypatch.setattr(state, "RENAMED_COMPONENTS", {"kernel": "weight"})


class Arrays:
    """A source of arrays in memory."""

    title = "arrays"

    def __init__(self, arrays):
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(array.dtype, array.shape) for name, array in arrays.items()
        }

    def read(self, name):
        return self.arrays[name]

    def __iter__(self):
        yield from self.arrays.items()


def test_replaces_renamed_components_and_keeps_suffixes():
    assert current_name("layers/0/query/kernel") == "layers/0/query/weight"
    assert current_name("layers/0/query/kernel.scale") == "layers/0/query/weight.scale"
    assert current_name("weights/kernel[0:2,0:4]") == "weights/weight[0:2,0:4]"
    assert current_name(("optimizer", "mu", "kernel")) == ("optimizer", "mu", "weight")
    assert current_name("layers/0/kernels/kernel_size") == "layers/0/kernels/kernel_size"


@pytest.mark.parametrize(
    ("stored", "expected", "matched"),
    [
        (["a/kernel"], ["a/weight"], {"a/weight": "a/kernel"}),
        (["a/kernel"], ["a/kernel"], {"a/kernel": "a/kernel"}),  # the model has the former name
        (["a/weight"], ["a/weight"], {"a/weight": "a/weight"}),  # written under the current name
        (["a/kernel"], ["b/weight"], {"a/kernel": "a/kernel"}),  # of another model
        (
            ["a/kernel", "a/weight"],
            ["a/weight"],
            {"a/kernel": "a/kernel", "a/weight": "a/weight"},
        ),
    ],
)
def test_former_names_match_only_what_the_model_expects(stored, expected, matched):
    assert match_names(stored, expected) == matched


def test_restores_weights_and_optimizer_state_under_current_names(tmp_path):
    tree = {"weights": FORMER, "optimizer": {"0": {"mu": FORMER, "nu": FORMER}}, "step": np.ones(1)}
    step = tmp_path / "3"
    with ocp.Checkpointer(StorageOptions().handler()) as writer:
        writer.save(step / "state", args=ocp.args.PyTreeSave(tree))
    weight = FORMER["mlp"]["kernel"]
    expected = {
        ("weights", "mlp", "weight"): weight,
        ("weights", "norm", "scale"): FORMER["norm"]["scale"],
        ("optimizer", "0", "mu", "mlp", "weight"): weight,
        ("optimizer", "0", "nu", "mlp", "weight"): weight,
        ("step",): np.ones(1),
    }
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in expected.items()}
    stored = SavedStep(step)
    tensors = stored.tensors_named_as(abstract)
    assert set(expected) <= set(tensors)
    assert not any("kernel" in name for name in tensors if name[1:2] != ("0",))
    restored = stored.restore(abstract)
    assert set(restored) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(restored[name], array)


def test_reads_a_weight_folder_under_current_names(tmp_path):
    arrays = {"mlp/kernel": FORMER["mlp"]["kernel"], "norm/scale": FORMER["norm"]["scale"]}
    write_native_folder(tmp_path / "weights", Arrays(arrays), {}, (), 10**9)
    folder = SafetensorsFolder.open(tmp_path / "weights", NATIVE_STEM)
    source = under_current_names(folder, {"mlp/weight": None, "norm/scale": None})
    assert set(source.tensors) == {"mlp/weight", "norm/scale"}
    np.testing.assert_array_equal(dict(source)["mlp/weight"], arrays["mlp/kernel"])
    assert under_current_names(folder, {"mlp/kernel": None, "norm/scale": None}) is folder


def test_reads_a_quantized_folder_under_current_names(tmp_path):
    arrays = {
        "mlp/kernel": np.array([[1, -2], [3, 4]], np.int8),
        "mlp/kernel.scale": np.array([[0.5, 2.0]], np.float32),
    }
    write_native_folder(tmp_path / "weights", Arrays(arrays), {}, (), 10**9)
    folder = QuantizedFolder.of(SafetensorsFolder.open(tmp_path / "weights", NATIVE_STEM), "int8")
    source = under_current_names(folder, {"mlp/weight": None})
    assert isinstance(source, QuantizedFolder)
    assert set(source.tensors) == {"mlp/weight"}
    np.testing.assert_array_equal(source.read("mlp/weight"), [[0.5, -4.0], [1.5, 8.0]])


def test_reads_a_local_checkpoint_under_current_names(tmp_path):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tier = LocalCheckpointManager(tmp_path, "run", "owner", {"data": 1})
    tier.save(4, {("weights", "mlp", "kernel"): jnp.arange(6.0)}, {"row": 2})
    tier.wait()
    name = ("weights", "mlp", "weight")
    restored = tier.restore(4, {name: jax.ShapeDtypeStruct((6,), jnp.float32, sharding=sharding)})
    assert restored is not None
    arrays, position = restored
    np.testing.assert_array_equal(arrays[name], np.arange(6.0))
    assert position == {"row": 2}
