"""Asynchronous saves: correct bytes, in order, and recovery from a full disk."""

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
def make_manager(tmp_path):
    managers = []

    def make(folder=None, storage=None, **more):
        managers.append(
            CheckpointManager(
                folder or tmp_path / "checkpoints", storage or StorageOptions(), **more
            )
        )
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


@pytest.fixture
def warnings(monkeypatch):
    """Log messages of level WARNING and above."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    handler = Lines()
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


def save(manager, step, tree):
    manager.save(step, tree, RUN | {"step": step}, "base_config: base.yml\n", {"row": step})


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
def test_save_copies_values_before_the_next_step(make_manager, storage):
    """Training reuses the memory of the state while it is being written."""
    manager = make_manager(storage=storage)
    step = jax.jit(lambda x: x * 1.25 + 1, donate_argnums=0)
    state = jnp.arange(200_000, dtype=jnp.float32)
    expected = {}
    for number in range(1, 10):
        state = step(state)
        if number % 3 == 0:
            expected[number] = np.array(state, copy=True)
            save(manager, number, {"weights": {"a": state}, "count": jnp.int32(number)})
    manager.wait()
    for number, values in expected.items():
        restored = read(manager.folder, number)
        assert restored[("weights", "a")].tobytes() == values.tobytes()
        assert restored[("count",)] == number
    assert SavedStep(manager.folder / "9").iterator_states() == [{"row": 9}]
    assert SavedStep(manager.folder / "9").run["step"] == 9


def test_target_data_file_size_limits_files(make_manager, tmp_path):
    numbers = np.random.default_rng(0).normal(size=(16, 25_000)).astype(np.float32)
    tree = {"weights": {str(row): jnp.asarray(one) for row, one in enumerate(numbers)}}
    largest = {}
    for size in (2**31, 200_000):
        manager = make_manager(tmp_path / str(size), StorageOptions(file_bytes=size))
        save(manager, 1, tree)
        manager.wait()
        largest[size] = max(
            path.stat().st_size for path in manager.folder.rglob("*") if path.is_file()
        )
    assert largest[200_000] < 500_000 < largest[2**31]


def test_old_step_is_deleted_after_the_new_one_is_on_disk(make_manager, monkeypatch):
    manager = make_manager(max_to_keep=1)
    save(manager, 1, {"a": jnp.ones(8)})
    manager.wait()
    seen = []
    write = module.write_digest

    def watched(step, *more):
        seen.append(all_steps(manager.folder))
        write(step, *more)

    monkeypatch.setattr(module, "write_digest", watched)
    save(manager, 2, {"a": jnp.zeros(8)})
    manager.wait()
    assert seen == [[1, 2]]
    assert all_steps(manager.folder) == [2]


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


def test_full_disk_fails_one_save_only(make_manager, small_disk, warnings):
    numbers = (
        np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    )  # 1.2 MB that cannot be compressed
    manager = make_manager(small_disk / "checkpoints")
    save(manager, 1, {"a": jnp.asarray(numbers)})
    manager.wait()
    assert manager.failure is None
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_500_000))
    save(manager, 2, {"a": jnp.asarray(numbers + 1)})
    manager.wait()
    assert manager.failure == "No space left on device"
    assert len(warnings) == 1
    assert "step 2 could not be saved" in warnings[0]
    assert "No space left on device; the newest checkpoint is of step 1" in warnings[0]
    assert [path.name for path in manager.folder.iterdir()] == ["1"], "what was begun is removed"
    assert read(manager.folder, 1)[("a",)].tobytes() == numbers.tobytes()
    ballast.unlink()
    save(manager, 3, {"a": jnp.asarray(numbers + 2)})
    manager.wait()
    assert manager.failure is None
    assert read(manager.folder, 3)[("a",)].tobytes() == (numbers + 2).tobytes()


def test_folder_that_cannot_be_created_is_reported(make_manager, tmp_path, warnings):
    (tmp_path / "file").write_text("")
    manager = make_manager(tmp_path / "file" / "checkpoints")
    save(manager, 1, {"a": jnp.ones(3)})
    manager.wait()
    assert "Not a directory" in manager.failure
    assert len(warnings) == 1
    assert "there is no checkpoint yet" in warnings[0]


def test_read_only_disk_is_detected_early(small_disk):
    check_writable(small_disk / "run" / "deep", "base_output_directory")
    assert not list(small_disk.iterdir()), "no trace is left"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        ConfigError, match="base_output_directory: .*run cannot be written: Read-only file system"
    ):
        check_writable(small_disk / "run", "base_output_directory")


def test_unreadable_step_raises(make_manager):
    manager = make_manager()
    save(manager, 1, {"a": jnp.ones(1000)})
    manager.wait()
    for path in (manager.folder / "1" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="1 cannot be read"):
        read(manager.folder, 1)
