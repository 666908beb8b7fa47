"""`maxtext inspect` and `maxtext convert params-only`, as a person runs them, without a device
being asked.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.checkpoint.manager import CheckpointManager, StorageOptions
from maxtext.checkpoint.open import model_text, open_checkpoint
from maxtext.checkpoint.state import to_flat_dict
from maxtext.cli.main import main
from maxtext.common.trees import unflatten_dict
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights

WORDS = [
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=32",
    "base_num_decoder_layers=2",
    "vocab_size=64",
    "max_target_length=16",
    "dtype=float32",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder with steps 4 and 8, and its weights."""
    folder = tmp_path_factory.mktemp("run")
    config = load(None, WORDS, environ={}, devices=Devices(1))
    weights = initial_weights(config)
    manager = CheckpointManager(folder / "checkpoints", StorageOptions())
    layout = {"scan_layers": True, "param_scan_axis": 1, "inhomogeneous_layer_cycle_interval": 1}
    run = {"layout": layout, "optimizer": "adamw", "processes": 1, "mesh": {}}
    tree = {"weights": unflatten_dict(to_flat_dict(weights)), "step": jnp.int32(8)}
    for step in (4, 8):
        manager.save(step, tree, run | {"step": step}, model_text(config), {})
    manager.close()
    return folder, weights


@pytest.fixture
def folder(made, tmp_path):
    import shutil

    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run"


def test_shows_steps_and_tensors(folder, capsys):
    (folder / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    assert main(["inspect", str(folder), "--verify"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [line for line in lines if line and line[0] in ("4", "8", "9.orbax-checkpoint-tmp")]
    assert [line[:3] for line in steps[:2]] == [
        ["4", "complete,", "verified"],
        ["8", "complete,", "verified"],
    ]
    assert steps[2][:2] == ["9.orbax-checkpoint-tmp", "incomplete"]
    query = next(
        line
        for line in lines
        if line and line[0] == "weights/layers/0/blocks/0/attention/query/weight"
    )
    assert query[1:] == ["16", "x", "2", "x", "2", "x", "8", "float32", "2.05", "KB"]


def test_json_output(folder, made, capsys):
    assert main(["inspect", str(folder / "checkpoints" / "4"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["about"]["step"] == 4
    shapes = {
        tensor["name"]: (tuple(tensor["shape"]), tensor["bytes"]) for tensor in said["tensors"]
    }
    expected = {
        "/".join(("weights", *name)): (leaf.shape, leaf.nbytes)
        for name, leaf in to_flat_dict(made[1]).items()
    }
    assert shapes == expected | {"step": ((), 4)}


def test_damage_is_named_with_exit_code_1(folder, capsys):
    step = folder / "checkpoints" / "4"
    file = max(
        (path for path in (step / "state").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(folder)]) == 0, "without --verify no file is read"
    assert main(["inspect", str(folder), "--verify"]) == 1
    said = capsys.readouterr()
    assert f"{step}: {file.relative_to(step)} has changed since it was written" in said.err
    assert "4     damaged" in said.out
    (step / "digest.process_0.json").unlink()
    assert main(["inspect", str(folder), "--verify"]) == 0
    assert "no digest to check it by" in capsys.readouterr().out


def test_params_only_extracts_the_weights(folder, made, tmp_path, capsys):
    out = tmp_path / "weights"
    assert main(["convert", "params-only", str(folder), str(out)]) == 0
    taken = open_checkpoint(out)
    assert taken.settings["base_emb_dim"].value == 16
    stacked = made[1]["layers"][0]["blocks"][0]["mlp"]["wo"]["weight"]
    for layer in (0, 1):
        np.testing.assert_array_equal(
            taken.source.read(f"layers/{layer}/mlp/wo/weight"), stacked[:, layer]
        )
    assert not any(name.startswith("optimizer") for name in taken.source.tensors)
    assert main(["inspect", str(out), "--verify"]) == 0
    assert "layers/1/mlp/wo/weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["inspect"], "DIR is missing: maxtext inspect DIR"),
        (["inspect", "{empty}"], "holds neither checkpoints of training nor safetensors"),
        (["inspect", "{empty}/nowhere"], "there is no folder"),
        (
            ["convert", "params-only", "{empty}", "{empty}/out"],
            "holds no complete checkpoint of training",
        ),
        (["convert", "params_only", "a", "b"], "did you mean params-only?"),
    ],
)
def test_bad_arguments(args, said, tmp_path, capsys):
    assert main([word.format(empty=tmp_path) for word in args]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
