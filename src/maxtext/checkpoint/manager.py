"""Saves training states asynchronously, one at a time, and manages the folder of a run's
checkpoints.

`save` blocks the caller only until the arrays are copied. A thread then waits until Orbax has
written the step, syncs it to disk, writes its digest (steps.py), and only after that removes
old steps. A save that fails (a full disk) is logged in one line, its leftovers are removed, and
older steps stay. `failures_in_a_row` tells the run, which continues or ends.
"""

import contextlib
import json
import logging
import shutil
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxtext.checkpoint import steps
from maxtext.checkpoint.multihost import (
    CompositeArgs,
    MultihostHandler,
    SaveBarrier,
    SaveFailed,
    allgather_int,
    error_summary,
)
from maxtext.checkpoint.steps import write_digest
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json, Tree
from maxtext.configs.types import MaxTextConfig

RUN_FILE, MODEL_FILE = "run.json", "config.yml"
INTERIM = "interim"  # in run.json: whether the next save replaces this step


def iterator_file(process: int) -> str:
    """The file with the data iterator's state of a process."""
    return f"process_{process}.json"


@dataclass(frozen=True)
class StorageOptions:
    """How Orbax stores arrays."""

    ocdbt: bool = True
    zarr3: bool = True
    file_bytes: int = 2**31
    concurrent_gb: int = 96

    @classmethod
    def of(cls, config: MaxTextConfig) -> "StorageOptions":
        return cls(
            ocdbt=config.checkpoint_storage_use_ocdbt,
            zarr3=config.checkpoint_storage_use_zarr3,
            file_bytes=config.checkpoint_storage_target_data_file_size_bytes,
            concurrent_gb=config.checkpoint_storage_concurrent_gb,
        )

    def handler(self) -> ocp.PyTreeCheckpointHandler:
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=self.ocdbt,
            use_zarr3=self.zarr3,
            save_concurrent_gb=self.concurrent_gb,
            restore_concurrent_gb=self.concurrent_gb,
        )

    def target_data_file_size(self) -> int | None:
        """Only zarr3 supports it."""
        return self.file_bytes if self.zarr3 else None


class MetadataHandler(ocp.AsyncCheckpointHandler):
    """Small files of a step, text or JSON. Each process writes its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    async def async_save(self, directory: Path, args: "MetadataSave") -> list[Future]:
        return [self.pool.submit(self.write, Path(directory), args.files)]

    def save(self, directory: Path, args: "MetadataSave") -> None:
        self.write(Path(directory), args.files)

    def write(self, directory: Path, files: Json) -> None:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (directory / name).write_text(text, encoding="utf-8")

    def restore(self, directory: Path, args: Any = None) -> Json:
        return {
            path.name: json.loads(path.read_text(encoding="utf-8"))
            for path in Path(directory).glob("*.json")
        }

    def close(self) -> None:
        self.pool.shutdown()


@ocp.args.register_with_handler(MetadataHandler, for_save=True, for_restore=True)
@dataclass
class MetadataSave(ocp.args.CheckpointArgs):
    files: Json


class CheckpointManager:
    """Saves the steps of one run.

    `max_to_keep` is the number of steps that stay (None: all). Older ones are moved to `archive`,
    or deleted if it is None. `start` is the step that the run starts from: later steps in the
    folder could not be read, and are set aside.
    """

    def __init__(
        self,
        folder: Path,
        storage: StorageOptions,
        max_to_keep: int | None = None,
        archive: Path | None = None,
        start: int = 0,
    ):
        self.folder = folder
        self.storage = storage
        self.max_to_keep = max_to_keep
        self.archive = archive
        self.start = start
        self.barrier = SaveBarrier()
        handler = MultihostHandler(
            self.barrier, **{steps.STATE: storage.handler(), steps.RUN: MetadataHandler()}
        )
        quiet_orbax()
        self.orbax = ocp.AsyncCheckpointer(
            handler,
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False,
                barrier_sync_fn=self.barrier if jax.process_count() > 1 else None,
            ),
        )
        self.thread: threading.Thread | None = None
        self.last: int | None = None  # the newest step that this manager saved
        self.failure: str | None = None  # why the newest save failed
        self.failures_in_a_row = 0
        self.is_folder_prepared = False

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def save(self, step: int, tree: Tree, run: Json, model: str, iterator_state: Any) -> None:
        """Start to save a state. `run` is the run's metadata, `model` the config.yml of its model,
        and `iterator_state` this process's position in its data.
        """
        self.wait()
        self.failure = None
        self.barrier.begin()
        files = {iterator_file(jax.process_index()): iterator_state}
        if jax.process_index() == 0:
            files |= {RUN_FILE: run, MODEL_FILE: model}
        file_size = self.storage.target_data_file_size()
        items = {
            steps.STATE: ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=file_size),
            steps.RUN: MetadataSave(files),
        }
        try:
            self.prepare_folder()
            self.orbax.save(self.folder / str(step), args=CompositeArgs(**items))
        except Exception as error:
            self.handle_failure(step, error)
            return
        self.thread = threading.Thread(
            target=self.finish, args=(step,), name="maxtext-saver", daemon=True
        )
        self.thread.start()

    def prepare_folder(self) -> None:
        """The first process creates and cleans up the folder. If that fails, it fails on all."""
        problem: OSError | None = None
        if jax.process_index() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if not self.is_folder_prepared:
                    steps.remove_leftovers(self.folder)
                    steps.set_aside_damaged(self.folder, self.start + 1)
            except OSError as error:
                problem = error
        self.is_folder_prepared = True
        if max(allgather_int(problem is not None)):
            raise problem or SaveFailed("the first process cannot write there")

    def finish(self, step: int) -> None:
        """In the thread of a save: wait until the step is complete and on disk, then remove old
        steps.
        """
        folder = self.folder / str(step)
        try:
            self.orbax.wait_until_finished()
        except Exception as error:
            self.handle_failure(step, error)
            return
        self.last = step
        self.failures_in_a_row = 0
        LOGGER.info("saved step %d to %s", step, folder)
        try:
            write_digest(folder, jax.process_index(), jax.process_count())
            if jax.process_index() == 0:
                remove_interim_steps(self.folder)
                steps.remove_old_steps(self.folder, self.max_to_keep, self.archive)
        except OSError as error:
            LOGGER.warning(
                "step %d is saved, but its digest or the removal of old steps failed: %s",
                step,
                error_summary(error),
            )

    def handle_failure(self, step: int, error: BaseException) -> None:
        self.failure = error_summary(error)
        self.failures_in_a_row += 1
        with contextlib.suppress(Exception):  # of the same save
            self.orbax.wait_until_finished()
        if jax.process_index() == 0:
            for path in self.folder.glob(f"{step}{steps.TMP_SUFFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
        older = steps.all_steps(self.folder)
        newest = (
            f"the newest checkpoint is of step {older[-1]}"
            if older
            else "there is no checkpoint yet"
        )
        LOGGER.warning(
            "step %d could not be saved to %s: %s; %s", step, self.folder, self.failure, newest
        )

    def wait(self) -> None:
        """Wait until the running save has finished or failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        self.wait()
        with contextlib.suppress(Exception):  # a failed save was logged already
            self.orbax.close()


def remove_interim_steps(folder: Path) -> None:
    """Delete the interim steps before the newest step."""
    for step in steps.all_steps(folder)[:-1]:
        path = folder / str(step)
        with contextlib.suppress(OSError, ValueError):  # a damaged file: the step stays
            if json.loads((path / steps.RUN / RUN_FILE).read_text()).get(INTERIM):
                steps.delete_step(path)


def quiet_orbax() -> None:
    """Silence Orbax's tracebacks through absl: failures are logged here, in one line each."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def check_writable(folder: Path, key: str) -> None:
    """Raise ConfigError if nothing can be written in a folder. Leaves no trace."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be written: {error.strerror or error}"
        ) from error
