"""Writing folders that the safetensors package and transformers read. A folder is complete or
absent.
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint import safetensors_writer as writer
from maxtext.checkpoint.safetensors_reader import NATIVE_STEM, SafetensorsFolder, find_hf_assets
from maxtext.checkpoint.safetensors_writer import (
    atomic_folder,
    plan_shards,
    write_hf_folder,
    write_native_folder,
)
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError

torch = pytest.importorskip("torch")
from safetensors import safe_open  # noqa: E402

TEXTS = {"config.yml": ""}


class Arrays:
    """Arrays as a stream, in an order of their own."""

    title = "arrays"

    def __init__(self, arrays, order=None, fail_after=None):
        self.arrays, self.order, self.fail_after = arrays, order or list(arrays), fail_after
        self.tensors = {
            name: TensorInfo(array.dtype, array.shape) for name, array in arrays.items()
        }

    def __iter__(self):
        for count, name in enumerate(self.order):
            if count == self.fail_after:
                raise RuntimeError("no more")
            yield name, self.arrays[name]


def some():
    draw = np.random.default_rng(0)
    return {
        "a": draw.integers(-9, 9, 3).astype(np.int8),
        "b": draw.standard_normal((5, 7)).astype(np.float32),
        "c": draw.standard_normal((2, 3, 4)).astype(ml_dtypes.bfloat16),
        "d": draw.standard_normal((4, 4)).astype(np.float16).T,  # not contiguous
        "scalar": np.array(1.5, np.float64),
        "empty": np.zeros((0, 3), np.float32),
        "flag": np.array([True, False, True]),
        "e": draw.standard_normal((5, 7)).astype(np.float32),
    }


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shard_bytes", [10**9, 200, 1])
def test_safetensors_reads_it(shard_bytes, tmp_path):
    arrays = some()
    write_hf_folder(
        tmp_path / "out",
        Arrays(arrays, sorted(arrays, reverse=True)),
        {"config.json": "{}"},
        [],
        shard_bytes,
    )
    files = sorted(tmp_path.glob("out/*.safetensors"))
    seen = {}
    for file in files:
        with safe_open(file, "pt") as stream:
            assert stream.metadata() == {"format": "pt"}
            seen |= {
                name: (stream.get_tensor(name), file.name)
                for name in stream.keys()  # noqa: SIM118
            }
    assert seen.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(seen[name][0].shape) == array.shape
        assert as_bytes(seen[name][0]) == np.ascontiguousarray(array).tobytes()
    index = tmp_path / "out" / "model.safetensors.index.json"
    if len(files) == 1:
        assert files[0].name == "model.safetensors"
        assert not index.exists()
    else:
        count = len(files)
        assert [file.name for file in files] == [
            f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)
        ]
        contents = json.loads(index.read_text())
        assert contents["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
        assert contents["weight_map"] == {name: file for name, (_, file) in seen.items()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        *(file.name for file in files),
        *([index.name] if len(files) > 1 else []),
    }
    # And our own reader.
    folder = SafetensorsFolder.open(tmp_path / "out")
    assert all(
        folder.read(name).tobytes() == np.ascontiguousarray(array).tobytes()
        for name, array in arrays.items()
    )


def test_shards_are_bounded():
    tensors = {
        str(n): TensorInfo(np.dtype(np.int8), (size,))
        for n, size in enumerate([40, 60, 1, 99, 150, 10, 90, 1])
    }
    assert [list(shard) for shard in plan_shards(tensors, 100)] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
        ["5", "6"],
        ["7"],
    ]


def test_data_is_aligned(tmp_path):
    """Some readers map tensors in place, which needs addresses that are multiples of the element's
    size.
    """
    arrays = some()
    write_hf_folder(tmp_path / "out", Arrays(arrays), {}, [])
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, array in arrays.items():
        assert entries[name]["data_offsets"][0] % array.dtype.itemsize == 0


def test_native_folder_round_trip(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text(f"text of {name}")
    arrays = some()
    reports = []
    out = tmp_path / "deep" / "out"
    texts = {"config.yml": "model_name: x\n", "hugging_face/config.json": "newer"}
    write_native_folder(
        out,
        Arrays(arrays),
        texts,
        sorted(source.iterdir()),
        200,
        lambda *report: reports.append(report),
    )
    assert (out / "config.yml").read_text() == "model_name: x\n"
    assert (out / "hugging_face" / "tokenizer.json").read_text() == "text of tokenizer.json"
    assert (out / "hugging_face" / "config.json").read_text() == "newer"
    assert (out / "weights.safetensors.index.json").exists()
    assert len(list(out.glob("weights-*-of-*.safetensors"))) > 1
    folder = SafetensorsFolder.open(out, NATIVE_STEM)
    assert all(
        folder.read(name).tobytes() == np.ascontiguousarray(array).tobytes()
        for name, array in arrays.items()
    )
    total = sum(array.nbytes for array in arrays.values())
    assert [name for _, _, name in reports] == list(arrays)
    assert reports[-1][:2] == (total, total)
    assert [done for done, _, _ in reports] == list(
        np.cumsum([array.nbytes for array in arrays.values()])
    )
    assert os.stat(out).st_mode & 0o777 == 0o777 & ~writer.current_umask()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_copies_have_the_folder_of_additional_chat_templates(tmp_path):
    source = tmp_path / "source"
    folder = source / "additional_chat_templates"
    folder.mkdir(parents=True)
    (folder / "tool_use.jinja").write_text("tools")
    (folder / "notes.txt").write_text("x")
    (source / "chat_template.jinja").write_text("default")
    write_native_folder(tmp_path / "native", Arrays(some()), TEXTS, find_hf_assets(source))
    native_assets = find_hf_assets(tmp_path / "native" / "hugging_face")
    write_hf_folder(tmp_path / "hf", Arrays(some()), {"config.json": "{}"}, native_assets)
    files = {path.relative_to(tmp_path / "hf") for path in (tmp_path / "hf").rglob("*.jinja")}
    assert set(map(str, files)) == {
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }
    assert (tmp_path / "hf/additional_chat_templates/tool_use.jinja").read_text() == "tools"


def test_single_native_shard_has_an_index(tmp_path):
    write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "weights-00001-of-00001.safetensors",
        "weights.safetensors.index.json",
        "config.yml",
    }


def test_existing_folders(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_native_folder(out, Arrays(some()), TEXTS, [])  # an empty folder is as good as none
    before = (out / "config.yml").stat().st_mtime_ns
    with pytest.raises(UserError, match="out exists already"):
        write_native_folder(out, Arrays(some()), TEXTS, [])
    assert (out / "config.yml").stat().st_mtime_ns == before
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(UserError, match="file exists already"):
        write_native_folder(file, Arrays(some()), TEXTS, [])
    assert file.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_a_link_to_an_empty_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_native_folder(tmp_path / "link", Arrays(some()), TEXTS, [])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.yml").exists()


FAILURES = {
    "source fails": (Arrays(some(), fail_after=4), RuntimeError),
    "a tensor never comes": (Arrays(some(), order=["a", "b"]), ValueError),
    "a tensor comes twice": (Arrays(some(), order=["a", "a"]), ValueError),
    "interrupted": (Arrays(some(), order=["a", "b"], fail_after=1), RuntimeError),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_leave_nothing(name, tmp_path):
    stream, kind = FAILURES[name]
    (tmp_path / "empty").mkdir()
    for out in ("new", "empty"):
        with pytest.raises(kind):
            write_native_folder(tmp_path / out, stream, TEXTS, [], shard_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not any((tmp_path / "empty").iterdir())


def test_keyboard_interrupt_leaves_nothing(tmp_path):
    def progress(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [], progress=progress)
    assert not any(tmp_path.iterdir())


def test_too_little_disk_space_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100)
    )
    with pytest.raises(
        UserError,
        match=r"out needs [\d.,]+ (bytes|B|KiB|MiB), and .* has only [\d.,]+ ?(B|KiB|MiB)? free",
    ):
        write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [])
    assert not any(tmp_path.iterdir())


def test_full_disk_raises_user_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_at", full)
    with pytest.raises(UserError, match="out cannot be written: .*No space left on device"):
        write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [])
    assert not any(tmp_path.iterdir())


def test_missing_hf_asset_raises_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written: .*No such file.*nowhere\.json"):
        write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [Path("nowhere.json")])
    assert not any(tmp_path.iterdir())


def test_removes_leftovers_that_are_not_locked(tmp_path):
    """Folders of the same name left by killed processes, which hold no lock; another name's are not
    touched.
    """
    for name in (".out.partial-dead", ".other.partial-dead", ".out[1].partial-dead"):
        (tmp_path / name / "deep").mkdir(parents=True)
    with atomic_folder(tmp_path / "out") as living:
        write_native_folder(tmp_path / "out", Arrays(some()), TEXTS, [])
        assert living.exists()
        shutil.rmtree(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.partial-dead",
        ".out[1].partial-dead",
        "out",
    ]
    write_native_folder(tmp_path / "out[1]", Arrays(some()), TEXTS, [])
    assert not (tmp_path / ".out[1].partial-dead").exists()


@pytest.mark.slow
def test_kill_leaves_no_folder(llama, hf_folder, tmp_path):
    """kill -9 halfway: nothing under the name; the next attempt succeeds and clears up."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", llama.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    process.stdin.write(json.dumps({"do": "hang", "hf": str(hf_folder[0]), "native": str(out)}))
    process.stdin.close()
    assert process.stdout.readline() == "half\n"
    (partial,) = tmp_path.glob(".out.partial-*")
    assert len(list(partial.glob("weights-*"))) > 1
    assert not out.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    assert partial.exists()
    write_native_folder(out, Arrays(some()), TEXTS, [])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
