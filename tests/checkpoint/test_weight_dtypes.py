"""Weights are floats: a header that calls them integers is refused, in Hugging Face's folders and
in native ones.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest

from maxtext.checkpoint.convert.command import from_folder, to_folder
from maxtext.common.errors import UserError
from tests.checkpoint.hf_folders import write_hf_folder


def rename_dtype(file: Path, old: str, new: str) -> None:
    """Change the dtype of the tensors of a safetensors file in its header alone."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] == old:
            entry["dtype"] = new
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    return write_hf_folder(tmp_path_factory.mktemp("dtypes") / "qwen", "qwen3-0.6b")


@pytest.mark.parametrize("dtype", ["I16", "U16"])
def test_hugging_face_folder(dtype, hf_folder, tmp_path):
    folder = shutil.copytree(hf_folder, tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        rename_dtype(file, "BF16", dtype)
    with pytest.raises(
        UserError, match=rf"model\.\S+ is {dtype}, and a weight is F32, BF16, F16 or F64"
    ):
        from_folder(folder, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_native_folder(hf_folder, tmp_path):
    from_folder(hf_folder, tmp_path / "native")
    for file in (tmp_path / "native").glob("*.safetensors"):
        rename_dtype(file, "BF16", "I16")
    with pytest.raises(UserError, match=r"\S+ is I16, and a weight is F32, BF16, F16 or F64"):
        to_folder(tmp_path / "native", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_fp8_without_scales_raises(hf_folder, tmp_path):
    """F8_E4M3 is two tensors of half the width, so the file itself stays whole."""
    folder = shutil.copytree(hf_folder, tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        for name, entry in entries.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                entry |= {"dtype": "F8_E4M3", "data_offsets": [first // 2, last // 2]}
        header = json.dumps(entries).encode()
        body = data[8 + length :]
        file.write_bytes(struct.pack("<Q", len(header)) + header + body[: len(body) // 2])
    with pytest.raises(UserError, match="is F8_E4M3, and a weight is"):
        from_folder(folder, tmp_path / "native")
