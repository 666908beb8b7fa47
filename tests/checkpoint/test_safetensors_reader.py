"""Reading safetensors folders that the safetensors package writes, and errors for damaged ones."""

import json
import re
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder, find_hf_assets
from maxtext.common.errors import UserError

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

KINDS = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.int64: np.int64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def test_reads_what_safetensors_writes(tmp_path):
    values = {str(kind): (torch.randn(3, 5) * 3).to(kind) for kind in KINDS}
    values |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "odd": torch.ones(7, dtype=torch.uint8),
    }
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = SafetensorsFolder.open(tmp_path)
    assert set(folder.tensors) == set(values)
    for name, tensor in values.items():
        array = folder.read(name)
        assert array.dtype == KINDS[tensor.dtype] == folder.tensors[name].dtype
        assert array.shape == tuple(tensor.shape) == folder.tensors[name].shape
        bits = (
            tensor.contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else tensor.numpy().tobytes()
        )
        assert array.tobytes() == bits
        assert array.flags.writeable


def test_shards_and_hf_assets(tmp_path):
    save_file({"a": torch.arange(4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file(
        {"b": torch.arange(5), "extra": torch.arange(6)},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("config.json", "tokenizer.model", ".hidden", "modeling_x.py", "pytorch_model.bin"):
        (tmp_path / name).write_text("x")
    folder = SafetensorsFolder.open(str(tmp_path))
    # The index does not know "extra"; it must not vanish.
    assert {name: folder.read(name).size for name in folder.tensors} == {"a": 4, "b": 5, "extra": 6}
    assert [file.name for file in find_hf_assets(tmp_path)] == ["config.json", "tokenizer.model"]


FILES = (
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
)
FIRST, SECOND, THIRD = FILES
INDEX = "model.safetensors.index.json"


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path, change):
    """Write a file again with another header."""
    entries, data = header(path)
    text = json.dumps(change(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def cut(path, count):
    with path.open("rb+") as stream:
        stream.truncate(path.stat().st_size - count)


def last_tensor(folder, file=SECOND):
    entries = header(folder / file)[0]
    entries.pop("__metadata__")
    return max(entries, key=lambda name: entries[name]["data_offsets"][1])


def broken_link(folder):
    (folder / INDEX).unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")


def rename_in_index(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.phantom"] = SECOND
    (folder / INDEX).write_text(json.dumps(index))


def set_dtype(folder, kind):
    name = last_tensor(folder)
    rewrite(folder / SECOND, lambda entries: entries | {name: entries[name] | {"dtype": kind}})


def only_pickle(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def outside(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def move_span(entries):
    name = next(name for name in entries if name != "__metadata__")
    first, last = entries[name]["data_offsets"]
    return entries | {name: entries[name] | {"data_offsets": [first, last + 2]}}


# name: (damage, what the message must say; {last} is the last tensor of the second file)
BAD = {
    "truncated by a byte": (
        lambda f: cut(f / SECOND, 1),
        r"{second} is truncated: \d+ of \d+ bytes, {last} "
        r"is "
        r"not",
    ),
    "truncated to the header": (
        lambda f: cut(f / SECOND, len(header(f / SECOND)[1])),
        "{second} is truncated",
    ),
    "truncated in the header": (
        lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:40]),
        "{second} is truncated.*header",
    ),
    "empty file": (
        lambda f: (f / SECOND).write_bytes(b""),
        r"{second} is not a safetensors file "
        r"\(0 "
        r"bytes\)",
    ),
    "another format": (
        lambda f: (f / SECOND).write_bytes(b"PK\x03\x04" * 99),
        "{second} is not a safetensors file",
    ),
    "web page": (
        lambda f: (f / SECOND).write_bytes(b"<html>" * 99),
        "{second} is not a safetensors file",
    ),
    "git-lfs pointer": (
        lambda f: (f / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "{second} is.*git-lfs",
    ),
    "header is no JSON": (
        lambda f: (f / SECOND).write_bytes(struct.pack("<Q", 8) + b"{abcdefg"),
        "{second} is not a.*header",
    ),
    "header is a list of numbers": (
        lambda f: (f / SECOND).write_bytes(struct.pack("<Q", 8) + b'{"a": 1}'),
        "{second} is not a.*header",
    ),
    "bytes after the end": (
        lambda f: (f / SECOND).open("ab").write(b"abc"),
        "{second} is damaged: 3 bytes follow",
    ),
    "spans overlap": (
        lambda f: rewrite(f / SECOND, move_span),
        "{second} is damaged: its header gives model",
    ),
    "dtype not known": (
        lambda f: set_dtype(f, "F4"),
        "{second}: {last} has dtype F4, which is not supported",
    ),
    "dtype of another size": (
        lambda f: set_dtype(f, "F32"),
        "{second} is damaged: its header gives {last}",
    ),
    "missing shard": (
        lambda f: (f / SECOND).unlink(),
        "{second} is missing: .*index.json expects model",
    ),
    "index names too much": (
        rename_in_index,
        "{second} lacks model.phantom, which .*index.json expects",
    ),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), "index.json is not valid JSON"),
    "index without a map": (
        lambda f: (f / INDEX).write_text("{}"),
        "index.json: weight_map must be an object",
    ),
    "index is a list": (
        lambda f: (f / INDEX).write_text("[1]"),
        "index.json must hold a JSON object",
    ),
    "index points outside": (
        outside,
        "names '../x.safetensors', which is not a file of its folder",
    ),
    "a link to nothing": (
        broken_link,
        "model.safetensors is not a file, or a link to a file that is gone",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), f"has {FIRST} but neither model.safetensors nor"),
    "only pickles": (
        only_pickle,
        "pytorch_model.bin: pickle files are never loaded, convert to safetensors first",
    ),
    "nothing": (
        lambda f: [file.unlink() for file in f.iterdir()],
        "has no weights: neither model.safetensors nor",
    ),
    "no folder": (shutil.rmtree, "is not a folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(name, hf_folder, tmp_path):
    damage, message = BAD[name]
    folder = tmp_path / "bad"
    shutil.copytree(hf_folder[0], folder)
    message = message.replace("{second}", re.escape(SECOND)).replace(
        "{last}", re.escape(last_tensor(folder))
    )
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        SafetensorsFolder.open(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_of_the_other_format_raises(hf_folder, tmp_path):
    with pytest.raises(UserError, match="Hugging Face's form.*convert them first"):
        SafetensorsFolder.open(hf_folder[0], NATIVE_STEM)
    (tmp_path / "weights.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="maxtext's own form"):
        SafetensorsFolder.open(tmp_path)


def test_file_that_shrinks_while_read_raises(hf_folder, tmp_path):
    shutil.copytree(hf_folder[0], tmp_path / "f")
    folder = SafetensorsFolder.open(tmp_path / "f")
    name = last_tensor(tmp_path / "f")
    cut(tmp_path / "f" / SECOND, 2)
    with pytest.raises(UserError, match=f"{SECOND} became shorter.*{name}"):
        folder.read(name)
    (tmp_path / "f" / SECOND).unlink()
    with pytest.raises(UserError, match=f"{SECOND} cannot be read: No such file"):
        folder.read(name)
