"""Loading weights by name: scanned and unrolled, on one device and on eight."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.convert import NATIVE_STEM, SafetensorsFolder, from_hf, write_native_folder
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.checkpoint.weights import (
    ModelWeights,
    ParamInfo,
    copy_into_blocks,
    find_param_infos,
    load_weights,
)
from maxtext.common.errors import UserError
from maxtext.common.trees import flatten_dict
from maxtext.layers.parameters import Template
from maxtext.layers.specs import Segment
from maxtext.models.registry import segments
from tests.compiling import cpu_devices

FORMS = [
    ["scan_layers=true"],
    ["scan_layers=true", "param_scan_axis=0"],
    ["scan_layers=true", "param_scan_axis=2"],
    ["scan_layers=true", "inhomogeneous_layer_cycle_interval=2"],
    ["scan_layers=false"],
    ["scan_layers=false", "inhomogeneous_layer_cycle_interval=2"],
]


class Numbers:
    """Named weights whose values all differ."""

    title = "numbers"

    def __init__(self, param_infos, dtype=np.float32):
        self.tensors = {
            name: TensorInfo(np.dtype(dtype), info.shape) for name, info in param_infos.items()
        }

    def read(self, name):
        tensor = self.tensors[name]
        first = list(self.tensors).index(name) * 10_000
        return (
            (first + np.arange(int(np.prod(tensor.shape))))
            .reshape(tensor.shape)
            .astype(tensor.dtype)
        )


def test_names(llama):
    _, _, param_infos = llama.model()
    per_layer = {
        "attention/query/weight": (32, 4, 8),
        "attention/key/weight": (32, 2, 8),
        "attention/value/weight": (32, 2, 8),
        "attention/out/weight": (4, 8, 32),
        "attention_norm/scale": (32,),
        "mlp_norm/scale": (32,),
        "mlp/wi_0/weight": (32, 48),
        "mlp/wi_1/weight": (32, 48),
        "mlp/wo/weight": (48, 32),
    }
    expected = {"embedder/embedding": (64, 32), "final_norm/scale": (32,), "head/weight": (32, 64)}
    expected |= {f"layers/{i}/{name}": shape for i in range(4) for name, shape in per_layer.items()}
    assert {name: info.shape for name, info in param_infos.items()} == expected
    numbers = [int(name.split("/")[1]) for name in param_infos if name.startswith("layers/")]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("words", FORMS)
def test_scanned_and_unrolled_have_the_same_names(llama, words):
    _, template, param_infos = llama.model(*words)
    plain = llama.model("scan_layers=false")[2]
    assert {name: (info.shape, info.dtype) for name, info in param_infos.items()} == {
        name: (info.shape, info.dtype) for name, info in plain.items()
    }
    assert list(param_infos) == list(plain)
    # Every element of the tree belongs to one name.
    leaves = flatten_dict(template.weights)
    for path, group in itertools.groupby(
        sorted(param_infos.values(), key=lambda p: str(p.path)), key=lambda p: p.path
    ):
        assert sum(int(np.prod(info.shape)) for info in group) == leaves[path].size


def test_layers_are_counted_over_segments():
    """Three segments: layer = first of the segment + repeat * length of its pattern + place in
    it.
    """
    parts = [Segment(("a",), 2), Segment(("b", "c"), 3), Segment(("d",), 1)]
    scanned = {
        "layers": {
            0: {"blocks": {0: {"w": ((5, 2, 7), (None, "layers", None))}}},
            1: {"blocks": {0: {"w": ((3,), ("layers",))}, 1: {"w": ((3, 4), ("layers", None))}}},
            2: {"blocks": {0: {"x": {"w": ((1,), ("layers",))}}}},
        },
        "mtp": {0: {"w": ((9,), (None,))}},
    }
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], np.float32), scanned, is_leaf=is_pair
    )
    axes = jax.tree.map(lambda leaf: leaf[1], scanned, is_leaf=is_pair)
    fixed = jax.tree.map(lambda leaf: False, scanned, is_leaf=is_pair)
    known = {"weights": weights, "axes": axes, "fixed_dtype": fixed, "__init__": lambda self: None}
    template = type("Fake", (Template,), known)()
    param_infos = find_param_infos(template, parts)
    assert {
        name: (info.path, info.stack_index, info.stack_axis, info.shape)
        for name, info in param_infos.items()
    } == {
        "mtp/0/w": (("mtp", 0, "w"), None, 0, (9,)),
        "layers/0/w": (("layers", 0, "blocks", 0, "w"), 0, 1, (5, 7)),
        "layers/1/w": (("layers", 0, "blocks", 0, "w"), 1, 1, (5, 7)),
        "layers/2/w": (("layers", 1, "blocks", 0, "w"), 0, 0, ()),
        "layers/3/w": (("layers", 1, "blocks", 1, "w"), 0, 0, (4,)),
        "layers/4/w": (("layers", 1, "blocks", 0, "w"), 1, 0, ()),
        "layers/5/w": (("layers", 1, "blocks", 1, "w"), 1, 0, (4,)),
        "layers/6/w": (("layers", 1, "blocks", 0, "w"), 2, 0, ()),
        "layers/7/w": (("layers", 1, "blocks", 1, "w"), 2, 0, (4,)),
        "layers/8/x/w": (("layers", 2, "blocks", 0, "x", "w"), 0, 0, ()),
    }


def is_pair(value):
    return isinstance(value, tuple)


@pytest.mark.parametrize("words", FORMS)
def test_load(llama, words):
    """The tree equals one that numpy stacks."""
    config, template, param_infos = llama.model(*words)
    source = Numbers(param_infos)
    reports = []
    weights = load_weights(
        source, param_infos, template, progress=lambda *report: reports.append(report)
    )
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weights) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), template.weights
    )
    cycle = len(segments(config)[0].pattern)
    leaves = flatten_dict(weights)
    for info in range(cycle):
        layers = [source.read(f"layers/{i}/attention/out/weight") for i in range(info, 4, cycle)]
        norms = [source.read(f"layers/{i}/mlp_norm/scale") for i in range(info, 4, cycle)]
        top = ("layers", 0, "blocks", info)
        if config.scan_layers:
            axis = config.param_scan_axis
            np.testing.assert_array_equal(
                leaves[(*top, "attention", "out", "weight")], np.stack(layers, axis)
            )
            np.testing.assert_array_equal(
                leaves[(*top, "mlp_norm", "scale")], np.stack(norms, min(axis, 1))
            )
        else:
            for repeat in range(4 // cycle):
                np.testing.assert_array_equal(
                    leaves[(*top, repeat, "attention", "out", "weight")], layers[repeat]
                )
                np.testing.assert_array_equal(
                    leaves[(*top, repeat, "mlp_norm", "scale")], norms[repeat]
                )
    np.testing.assert_array_equal(
        leaves["embedder", "embedding"], source.read("embedder/embedding")
    )
    assert len(reports) == len(leaves)
    assert reports[-1][0] == reports[-1][1] == sum(leaf.nbytes for leaf in leaves.values())
    # And out again.
    model = ModelWeights(weights, param_infos)
    assert model.tensors == source.tensors
    for name, array in model:
        np.testing.assert_array_equal(array, source.read(name))


def test_scanned_and_unrolled_models_compute_the_same(llama):
    """From one folder of small random weights."""
    ids = np.arange(16)[None] % 64
    logits = []
    for words in (["scan_layers=true"], ["scan_layers=false"]):
        _, template, param_infos = llama.model(*words)
        draws = np.random.default_rng(0)
        values = {
            name: draws.standard_normal(param_infos[name].shape).astype(np.float32) * 0.3
            for name in sorted(param_infos)
        }
        source = type(
            "Values",
            (),
            {
                "title": "",
                "tensors": Numbers(param_infos).tensors,
                "read": lambda self, name, values=values: values[name],
            },
        )()
        run = jax.jit(
            lambda weights, template=template: template.bind(weights)(ids, np.arange(16)[None])
        )
        logits.append(np.asarray(run(load_weights(source, param_infos, template))))
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert np.abs(logits[0]).max() > 0.1


def test_dtypes(llama):
    """The template's dtype; or another one for floats. The values are those that numpy's cast
    gives.
    """
    _, template, param_infos = llama.model()
    source = Numbers(param_infos, ml_dtypes.bfloat16)
    plain, half = (
        load_weights(source, param_infos, template, dtype=dtype) for dtype in (None, np.float16)
    )
    wide = source.read("head/weight").astype(np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(plain)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(plain["head"]["weight"], wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {np.dtype(np.float16)}
    _, template, param_infos = llama.model("weight_dtype=bfloat16")
    source = Numbers(param_infos, np.float32)
    loaded = load_weights(source, param_infos, template)
    assert loaded["head"]["weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        loaded["head"]["weight"], source.read("head/weight").astype(ml_dtypes.bfloat16)
    )


def test_source_of_another_model_raises(llama):
    _, template, param_infos = llama.model()
    source = Numbers(param_infos)
    source.tensors["layers/4/mlp_norm/scale"] = source.tensors.pop("layers/3/mlp_norm/scale")
    source.tensors["head/weight"] = TensorInfo(np.dtype(np.float32), (64, 32))
    with pytest.raises(UserError) as caught:
        load_weights(source, param_infos, template)
    assert str(caught.value) == (
        "numbers does not fit the model (3 problems): layers/3/mlp_norm/scale is missing; "
        "layers/4/mlp_norm/scale is not a weight of this model; head/weight has shape [64, 32], "
        "the model needs [32, 64]"
    )


def test_blocks_with_some_of_the_layers(llama):
    """As where the stack itself is split over devices: a block takes its layers, and others are not
    read.
    """
    info = ParamInfo(("w",), 3, 1, (4, 6), np.dtype(np.float32))
    source = llama.Counted(Numbers({"w": info}))
    blocks = {
        ((0, 4), (first, first + 2), (3, 6)): np.zeros((4, 2, 3), np.float32) for first in (0, 2)
    }
    copy_into_blocks(blocks, info, source, "w")
    early, late = blocks.values()
    assert not early.any()
    assert not late[:, 0].any()
    np.testing.assert_array_equal(late[:, 1], np.arange(24).reshape(4, 6)[:, 3:])
    assert source.reads == 1
    copy_into_blocks({((0, 4), (0, 2), (3, 6)): early}, info, source, "w")
    assert source.reads == 1


@pytest.fixture(scope="module")
def folder(llama, hf_folder, tmp_path_factory):
    """A native folder of the small Llama."""
    out = tmp_path_factory.mktemp("native") / "llama"
    _, _, param_infos = llama.model()
    write_native_folder(
        out, from_hf(SafetensorsFolder.open(hf_folder[0]), llama.RULES, param_infos), {}, []
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "host_bytes"),
    [
        (["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_data_parallelism=2"], 10**9),
        (["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "scan_layers=false"], 1),
    ],
)
def test_eight_devices(llama, run_job, folder, tmp_path, words, host_bytes):
    file = str(tmp_path / "weights.npz")
    job = {
        "do": "shard",
        "native": str(folder),
        "words": words,
        "host_bytes": host_bytes,
        "file": file,
    }
    result = run_job(job, XLA_FLAGS=cpu_devices(8)["XLA_FLAGS"])
    assert result["devices"] == 8
    loaded = np.load(file)
    _, template, param_infos = llama.model(*[word for word in words if word.startswith("scan")])
    source = SafetensorsFolder.open(folder, NATIVE_STEM)
    expected = flatten_dict(load_weights(source, param_infos, template))
    assert set(loaded) == {"/".join(map(str, path)) for path in expected}
    for path, leaf in expected.items():
        assert loaded["/".join(map(str, path))].tobytes() == np.asarray(leaf).tobytes()
    if host_bytes > 1:  # room for all blocks: every weight is read once
        assert result["reads"] == len(param_infos)
        query = result["split"]["layers/0/blocks/0/attention/query/weight"]
        assert query == [
            [16, 4, 2, 8],
            [32, 4, 4, 8],
            "True",
        ]  # fsdp and tensor halve a dimension each
    else:  # a block at a time: once for each of fsdp 4 times tensor 2, where both split it
        assert len(param_infos) < result["reads"] <= 8 * len(param_infos)
        query = result["split"]["layers/0/blocks/0/0/attention/query/weight"]
        assert query == [[8, 2, 8], [32, 4, 8], "True"]
