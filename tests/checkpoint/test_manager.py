"""Saves in the background: the right bytes, in order, and a run that outlives a full disk."""

import logging
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.checkpoint import manager as module
from maxtext.checkpoint.manager import CheckpointManager, StorageOptions, check_writable
from maxtext.checkpoint.saved_step import CorruptCheckpoint, SavedStep
from maxtext.checkpoint.steps import all_steps
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER

RUN = {"processes": 1, "layout": {}, "optimizer": "adamw"}


@pytest.fixture
def make_saver(tmp_path):
    savers = []

    def make(folder=None, storage=None, **more):
        savers.append(
            CheckpointManager(
                folder or tmp_path / "checkpoints", storage or StorageOptions(), **more
            )
        )
        return savers[-1]

    yield make
    for saver in savers:
        saver.close()


@pytest.fixture
def warnings(monkeypatch):
    """Lines of the log from warnings on."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler = Lines()
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


def save(saver, step, tree):
    saver.save(step, tree, RUN | {"step": step}, "base_config: base.yml\n", {"place": step})


def read(folder, step):
    stored = SavedStep(folder / str(step))
    wanted = {
        name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in stored.tensors.items()
    }
    return stored.restore(wanted)


@pytest.mark.parametrize(
    "storage",
    [
        StorageOptions(),
        StorageOptions(zarr3=False, ocdbt=False),
        StorageOptions(zarr3=False),
        StorageOptions(file_bytes=4096),
    ],
    ids=str,
)
def test_a_save_holds_the_values_of_its_moment(make_saver, storage):
    """Steps go on, in the very memory of the state, while it is being written."""
    saver = make_saver(storage=storage)
    step = jax.jit(lambda x: x * 1.25 + 1, donate_argnums=0)
    state = jnp.arange(200_000, dtype=jnp.float32)
    expected = {}
    for number in range(1, 10):
        state = step(state)
        if number % 3 == 0:
            expected[number] = np.array(state, copy=True)
            save(saver, number, {"weights": {"a": state}, "count": jnp.int32(number)})
    saver.wait()
    for number, values in expected.items():
        found = read(saver.folder, number)
        assert found[("weights", "a")].tobytes() == values.tobytes()
        assert found[("count",)] == number
    assert SavedStep(saver.folder / "9").iterator_states() == [{"place": 9}]
    assert SavedStep(saver.folder / "9").run["step"] == 9


def test_files_are_cut_to_the_wished_size(make_saver, tmp_path):
    numbers = np.random.default_rng(0).normal(size=(16, 25_000)).astype(np.float32)
    tree = {"weights": {str(row): jnp.asarray(one) for row, one in enumerate(numbers)}}
    largest = {}
    for size in (2**31, 200_000):
        saver = make_saver(tmp_path / str(size), StorageOptions(file_bytes=size))
        save(saver, 1, tree)
        saver.wait()
        largest[size] = max(
            path.stat().st_size for path in saver.folder.rglob("*") if path.is_file()
        )
    assert largest[200_000] < 500_000 < largest[2**31]


def test_the_old_one_goes_after_the_new_one_is_on_disk(make_saver, monkeypatch):
    saver = make_saver(kept=1)
    save(saver, 1, {"a": jnp.ones(8)})
    saver.wait()
    seen = []
    write = module.write_digest

    def watched(step, *more):
        seen.append(all_steps(saver.folder))
        write(step, *more)

    monkeypatch.setattr(module, "write_digest", watched)
    save(saver, 2, {"a": jnp.zeros(8)})
    saver.wait()
    assert seen == [[1, 2]]
    assert all_steps(saver.folder) == [2]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting a small disk needs more rights")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_spoils_one_save_and_nothing_else(make_saver, small_disk, warnings):
    numbers = (
        np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    )  # 1.2 MB that cannot be compressed
    saver = make_saver(small_disk / "checkpoints")
    save(saver, 1, {"a": jnp.asarray(numbers)})
    saver.wait()
    assert saver.failure is None
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_500_000))
    save(saver, 2, {"a": jnp.asarray(numbers + 1)})
    saver.wait()
    assert saver.failure == "No space left on device"
    assert len(warnings) == 1
    assert "step 2 could not be saved" in warnings[0]
    assert "No space left on device; the newest checkpoint is of step 1" in warnings[0]
    assert [path.name for path in saver.folder.iterdir()] == ["1"], "what was begun is removed"
    assert read(saver.folder, 1)[("a",)].tobytes() == numbers.tobytes()
    ballast.unlink()
    save(saver, 3, {"a": jnp.asarray(numbers + 2)})
    saver.wait()
    assert saver.failure is None
    assert read(saver.folder, 3)[("a",)].tobytes() == (numbers + 2).tobytes()


def test_a_folder_that_cannot_be_made_is_reported(make_saver, tmp_path, warnings):
    (tmp_path / "file").write_text("")
    saver = make_saver(tmp_path / "file" / "checkpoints")
    save(saver, 1, {"a": jnp.ones(3)})
    saver.wait()
    assert "Not a directory" in saver.failure
    assert len(warnings) == 1
    assert "there is no checkpoint yet" in warnings[0]


def test_a_read_only_disk_is_found_before_anything_is_written(small_disk):
    check_writable(small_disk / "run" / "deep", "base_output_directory")
    assert not list(small_disk.iterdir()), "no trace is left"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        ConfigError, match="base_output_directory: .*run cannot be written: Read-only file system"
    ):
        check_writable(small_disk / "run", "base_output_directory")


def test_a_step_that_cannot_be_read_says_so(make_saver):
    saver = make_saver()
    save(saver, 1, {"a": jnp.ones(1000)})
    saver.wait()
    for path in (saver.folder / "1" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="1 cannot be read"):
        read(saver.folder, 1)
