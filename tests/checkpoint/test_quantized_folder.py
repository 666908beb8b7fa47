"""Folders of quantized weights: bytes on disk, exact round trips, and errors."""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.convert.command import to_folder
from maxtext.checkpoint.open import model_param_infos, open_checkpoint, save_native
from maxtext.checkpoint.quantized import PackedWeights, QuantizedFolder, load_model, pack, unpack
from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder
from maxtext.checkpoint.safetensors_writer import write_native_folder
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import ModelWeights
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.trees import flatten_dict
from maxtext.configs.sources import from_python
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template
from maxtext.sharding import AxisRules, make_mesh

KINDS = pytest.mark.parametrize("dtype", ["int8", "int4"])
WIDE = "base_emb_dim=256"  # so that int4 has groups


class Plain:
    """Normal numbers by name."""

    title = "plain"

    def __init__(self, param_infos):
        self.tensors = {
            name: TensorInfo(np.dtype(np.float32), info.shape) for name, info in param_infos.items()
        }

    def read(self, name):
        seed = list(self.tensors).index(name)
        return np.random.default_rng(seed).normal(size=self.tensors[name].shape).astype(np.float32)


def loaded(source, config, template, param_infos, progress=None):
    return load_model(
        source,
        config,
        param_infos,
        template,
        AxisRules.from_config(config, make_mesh(config)),
        progress,
    )


@pytest.fixture(scope="module")
def folders(llama, tmp_path_factory):
    """{dtype: (folder, weights that it was written from, plain source)}; the model is scanned."""
    written = {}
    for dtype in ("int8", "int4"):
        config, template, param_infos = llama.model(WIDE, f"quantization={dtype}")
        source = Plain(param_infos)
        weights = loaded(source, config, template, param_infos)
        folder = tmp_path_factory.mktemp(dtype) / "folder"
        save_native(folder, config, PackedWeights(ModelWeights(weights, param_infos)))
        written[dtype] = folder, weights, source
    return written


def reopened(folder, **keys):
    checkpoint = open_checkpoint(folder)
    config = load(
        None, from_python(keys | {"max_target_length": 16}), environ={}, model=checkpoint.settings
    )
    template = make_template(config)
    param_infos = model_param_infos(template, config)
    return loaded(
        checkpoint.weights(config, param_infos), config, template, param_infos
    ), param_infos


def same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, actual) == jax.tree.map(
        lambda leaf: leaf.dtype, expected
    )


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_pack(length):
    values = np.random.default_rng(0).integers(-8, 8, (3, 5, length)).astype(ml_dtypes.int4)
    stored = pack(values)
    assert stored.dtype == np.uint8
    assert stored.shape == (3, 5, math.ceil(length / 2))
    np.testing.assert_array_equal(unpack(stored, length), values)
    assert unpack(stored, length).dtype == values.dtype


def test_first_int4_is_in_the_lower_half_byte():
    assert pack(np.array([1, -1], ml_dtypes.int4)).tolist() == [0xF1]
    assert pack(np.array([-8, 7, 3], ml_dtypes.int4)).tolist() == [0x78, 0x03]


@pytest.mark.slow
@KINDS
def test_on_disk(folders, dtype):
    folder, _, _ = folders[dtype]
    tensors = SafetensorsFolder.open(folder, NATIVE_STEM).tensors
    half = 2 if dtype == "int4" else 1
    kind = np.dtype(np.uint8 if dtype == "int4" else np.int8)
    groups = 2 if dtype == "int4" else 1
    float32 = np.dtype(np.float32)
    assert tensors["layers/3/mlp/wi_0/weight"] == TensorInfo(kind, (256, 48 // half))
    assert tensors["layers/3/mlp/wi_0/weight.scale"] == TensorInfo(float32, (groups, 48))
    assert tensors["layers/0/attention/out/weight"] == TensorInfo(kind, (4, 8, 256 // half))
    assert tensors["layers/0/attention/out/weight.scale"] == TensorInfo(float32, (1, 1, 256))
    assert tensors["embedder/embedding"] == TensorInfo(float32, (64, 256))
    assert "layers/0/mlp_norm/scale.scale" not in tensors
    lines = (folder / "config.yml").read_text().splitlines()
    assert {f"quantization: {dtype}", "checkpoint_is_quantized: true"} <= set(lines)
    kernels = 256 * 64 + 4 * (256 * (32 + 16 + 16) + 32 * 256 + 3 * 256 * 48)
    scales = groups * 64 + 4 * (groups * (32 + 16 + 16 + 2 * 48) + 256 + 256)
    plain = 64 * 256 + 256 + 4 * 2 * 256
    assert sum(tensor.nbytes for tensor in tensors.values()) == kernels // half + 4 * (
        scales + plain
    )


@KINDS
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_there_and_back(folders, dtype, scanned):
    """By name, so that a stack of layers and each layer of its own are the same."""
    folder, weights, _ = folders[dtype]
    again, param_infos = reopened(folder, scan_layers=scanned, dtype="float32")
    if scanned:
        same(again, weights)
    stored, expected = (
        PackedWeights(ModelWeights(again, param_infos)),
        SafetensorsFolder.open(folder, NATIVE_STEM),
    )
    assert stored.tensors == dict(expected.tensors)
    for name, array in stored:
        np.testing.assert_array_equal(array, expected.read(name))


@KINDS
def test_reads_as_plain_floats(folders, dtype, tmp_path):
    folder, _, source = folders[dtype]
    opened = open_checkpoint(folder).source
    assert isinstance(opened, QuantizedFolder)
    assert opened.tensors == source.tensors
    for name, array in opened:
        exact = source.read(name)
        assert array.dtype == np.float32
        if "weight" in name:
            scale = opened.scales.read(name)
            assert 0 < np.abs(array - exact).max() <= scale.max() * 0.5001
        else:
            np.testing.assert_array_equal(array, exact)
    to_folder(folder, tmp_path / "hf")
    expected = SafetensorsFolder.open(tmp_path / "hf")
    down = expected.read("model.layers.2.mlp.down_proj.weight")
    np.testing.assert_array_equal(down.T, opened.read("layers/2/mlp/wo/weight"))
    assert not [name for name in expected.tensors if "scale" in name]
    assert "quantization" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_one_weight_at_a_time_is_in_floats(llama):
    """After each weight, nothing lives but what the model keeps of the weights so far."""
    config, template, param_infos = llama.model("quantization=int8")
    source = Plain(param_infos)
    before = {id(array) for array in jax.live_arrays()}
    live = []

    def progress(done, total, name):
        live.append([array for array in jax.live_arrays() if id(array) not in before])

    weights = loaded(source, config, template, param_infos, progress)
    expected = 0
    for leaf, arrays in zip(flatten_dict(weights).values(), live, strict=True):
        expected += sum(part.nbytes for part in jax.tree.leaves(leaf))
        assert sum(array.nbytes for array in arrays) == expected
    assert sum(isinstance(leaf, QuantizedWeight) for leaf in flatten_dict(weights).values()) == 8


def test_existing_folder_is_not_overwritten(folders, llama):
    folder, weights, _ = folders["int8"]
    config, _, param_infos = llama.model(WIDE, "quantization=int8")
    with pytest.raises(UserError, match="exists already"):
        save_native(folder, config, PackedWeights(ModelWeights(weights, param_infos)))
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def rewritten(folder, out, change):
    """The folder with its tensors changed."""
    opened = SafetensorsFolder.open(folder, NATIVE_STEM)
    arrays = {name: opened.read(name) for name in opened.tensors}
    change(arrays)

    class Changed:
        title = "changed"
        tensors = {name: TensorInfo(array.dtype, array.shape) for name, array in arrays.items()}

        def __iter__(self):
            return iter(arrays.items())

    write_native_folder(out, Changed(), {"config.yml": (folder / "config.yml").read_text()}, [])
    return out


WI = "layers/1/mlp/wi_0/weight"
DAMAGE = {
    "no scale": (
        lambda arrays: arrays.pop(f"{WI}.scale"),
        rf"{WI} has codes and has no {WI}.scale",
    ),
    "no kernel": (lambda arrays: arrays.pop(WI), rf"{WI}.scale has no weight to scale"),
    "other groups": (
        lambda arrays: arrays.update({f"{WI}.scale": np.ones((3, 48), np.float32)}),
        rf"{WI} \[256, 48\] and {WI}.scale \[3, 48\] are not an int8 weight and its scales",
    ),
    "finer groups": (
        lambda arrays: arrays.update({f"{WI}.scale": np.ones((4, 48), np.float32)}),
        rf"{WI}.scale has shape \[4, 48\], the model needs \[1, 48\]",
    ),
    "floats": (
        lambda arrays: [
            arrays.pop(f"{WI}.scale"),
            arrays.update({WI: arrays[WI].astype(np.float32)}),
        ],
        rf"{WI} is not quantized in it",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(folders, tmp_path, name):
    change, message = DAMAGE[name]
    folder = rewritten(folders["int8"][0], tmp_path / "damaged", change)
    with pytest.raises(UserError, match=message):
        reopened(folder)


def test_contradicting_quantization_keys_raise(folders, llama, tmp_path):
    int8, int4 = folders["int8"][0], folders["int4"][0]
    with pytest.raises(
        ConfigError, match="quantization='int4' .* differs from 'int8' in the model's file"
    ):
        reopened(int8, quantization="int4")
    with pytest.raises(
        ConfigError, match="quantization='int8', but .* has weights in int4 already: leave"
    ):
        reopened(int4, quantization="int8", override_model_config=True)
    with pytest.raises(ConfigError, match=r"quantization='', but .* has weights in int8 already"):
        reopened(int8, quantization="", override_model_config=True)
    config, template, param_infos = llama.model("checkpoint_is_quantized=true")
    with pytest.raises(
        ConfigError, match="checkpoint_is_quantized=true, but plain has no quantized weights"
    ):
        loaded(Plain(param_infos), config, template, param_infos)
    config, template, param_infos = llama.model("quantization=fp8_full")
    with pytest.raises(ConfigError, match=r"quantization=fp8_full \(.*\) is for training"):
        loaded(Plain(param_infos), config, template, param_infos)
    with pytest.raises(
        ConfigError, match="save_quantized_params_path=x .* would do nothing: it needs quantization"
    ):
        llama.model("save_quantized_params_path=x")
    shutil.copytree(int8, tmp_path / "unsaid")
    text = (int8 / "config.yml").read_text().replace("quantization: int8", "")
    (tmp_path / "unsaid" / "config.yml").write_text(text)
    with pytest.raises(
        UserError, match=r"config.yml must say quantization: fp8 or int8 or int4 or mxfp4, not None"
    ):
        open_checkpoint(tmp_path / "unsaid")
