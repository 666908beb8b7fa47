"""Folders with vision tensors: the text model is not written in their place unless somebody asks
for it.
"""

import json

import numpy as np
import pytest

from maxtext.checkpoint.convert.command import from_folder
from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.cli.main import main
from tests.checkpoint.hf_folders import write_hf_folder

SAFETENSORS = pytest.importorskip("safetensors.numpy")


@pytest.fixture
def native(tmp_path):
    """Native weights of a folder of text that also had a tensor of a vision tower."""
    folder = write_hf_folder(tmp_path / "whole", "gemma3-4b", shard_bytes=10**9)
    SAFETENSORS.save_file(
        {"vision_tower.patch.weight": np.zeros((2, 2), np.float32)},
        folder / "model-vision.safetensors",
    )
    files = dict.fromkeys(SafetensorsFolder.open(folder).tensors, "model-text.safetensors")
    (folder / "model.safetensors").rename(folder / "model-text.safetensors")
    index = {"weight_map": files | {"vision_tower.patch.weight": "model-vision.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    from_folder(folder, tmp_path / "native")
    return tmp_path / "native"


def test_saving_without_vision_tensors_raises(native, tmp_path, capsys):
    assert main(["convert", "to_hf", str(native), str(tmp_path / "out")]) == 2
    assert (
        "had 1 vision or audio tensors, such as vision_tower.patch.weight"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_text_only_drops_vision_tensors(native, tmp_path, capsys):
    assert main(["convert", "to_hf", str(native), str(tmp_path / "out"), "--text-only"]) == 0
    assert not [
        name for name in SafetensorsFolder.open(tmp_path / "out").tensors if "vision" in name
    ]
    assert "tensors, bfloat16" in capsys.readouterr().out


def test_the_flag_is_of_one_direction(native, tmp_path, capsys):
    assert main(["convert", "from_hf", str(native), str(tmp_path / "out"), "--text-only"]) == 2
    assert "--text-only would do nothing in maxtext convert from_hf" in capsys.readouterr().err
