"""Saves training states in the background, one at a time, and keeps the folder of a run's
checkpoints in order.

`save` holds the caller until the arrays are safe from being changed, and no longer. A thread then
waits until Orbax has written the step, puts it on disk and writes its digest (integrity.py), and
only after that lets old steps go. A save that fails (a full disk) is reported in one line, its
leftovers are removed, and older steps stay; `failures_in_a_row` tells the run, which goes on or
ends.
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
from maxtext.checkpoint.integrity import write_digest
from maxtext.checkpoint.multihost import (
    Items,
    MultihostHandler,
    SaveBarrier,
    SaveFailed,
    allgather_int,
    reason,
)
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig

RUN_FILE, MODEL_FILE = "run.json", "config.yml"


def position_file(process: int) -> str:
    return f"process_{process}.json"


@dataclass(frozen=True)
class StorageOptions:
    """How arrays lie in files."""

    ocdbt: bool = True
    zarr3: bool = True
    file_bytes: int = 2**31
    concurrent_gb: int = 96

    @classmethod
    def of(cls, config: MaxTextConfig) -> "StorageOptions":
        return cls(
            config.checkpoint_storage_use_ocdbt,
            config.checkpoint_storage_use_zarr3,
            config.checkpoint_storage_target_data_file_size_bytes,
            config.checkpoint_storage_concurrent_gb,
        )

    def handler(self) -> ocp.PyTreeCheckpointHandler:
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=self.ocdbt,
            use_zarr3=self.zarr3,
            save_concurrent_gb=self.concurrent_gb,
            restore_concurrent_gb=self.concurrent_gb,
        )


class Descriptions(ocp.AsyncCheckpointHandler):
    """Small files of a step, text or JSON, of which each process writes its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    async def async_save(self, directory: Any, args: "SaveDescriptions") -> list[Future]:
        return [self.pool.submit(self.write, Path(directory), args.files)]

    def save(self, directory: Any, args: "SaveDescriptions") -> None:
        self.write(Path(directory), args.files)

    def write(self, directory: Path, files: dict[str, Any]) -> None:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (directory / name).write_text(text, encoding="utf-8")

    def restore(self, directory: Any, args: Any = None) -> dict[str, Any]:
        return {
            path.name: json.loads(path.read_text(encoding="utf-8"))
            for path in Path(directory).glob("*.json")
        }

    def close(self) -> None:
        self.pool.shutdown()


@ocp.args.register_with_handler(Descriptions, for_save=True, for_restore=True)
@dataclass
class SaveDescriptions(ocp.args.CheckpointArgs):
    files: dict[str, Any]


class CheckpointManager:
    """Of one run. `kept`: how many steps stay (None: all); `attic`: where old ones go instead of
    being deleted; `start`: the step that the run starts from, so that later ones in the folder are
    damaged."""

    def __init__(
        self,
        folder: Path,
        storage: StorageOptions,
        kept: int | None = None,
        attic: Path | None = None,
        start: int = 0,
    ):
        self.folder, self.storage, self.kept, self.attic, self.start = (
            folder,
            storage,
            kept,
            attic,
            start,
        )
        self.meetings = SaveBarrier()
        handler = MultihostHandler(
            self.meetings, **{steps.STATE: storage.handler(), steps.RUN: Descriptions()}
        )
        quiet_orbax()
        self.orbax = ocp.AsyncCheckpointer(
            handler,
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False,
                barrier_sync_fn=self.meetings if jax.process_count() > 1 else None,
            ),
        )
        self.thread: threading.Thread | None = None
        self.last: int | None = None  # the newest step that was saved here
        self.failure: str | None = None  # why the newest save failed
        self.failures_in_a_row = 0
        self.tidied = False

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def save(
        self, step: int, tree: dict[str, Any], run: dict[str, Any], model: str, position: Any
    ) -> None:
        """Begin to save a state. `run` describes it and `model` is the config.yml of its model;
        `position` is this process's place in its data."""
        self.wait()
        self.failure = None
        self.meetings.begin()
        files = {position_file(jax.process_index()): position}
        if jax.process_index() == 0:
            files |= {RUN_FILE: run, MODEL_FILE: model}
        items = {
            steps.STATE: ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=self.target_size()),
            steps.RUN: SaveDescriptions(files),
        }
        try:
            self.prepare()
            self.orbax.save(self.folder / str(step), args=Items(**items))
        except Exception as error:
            self.failed(step, error)
            return
        self.thread = threading.Thread(
            target=self.finish, args=(step,), name="maxtext-saver", daemon=True
        )
        self.thread.start()

    def target_size(self) -> int | None:
        """Only zarr3 heeds it."""
        return self.storage.file_bytes if self.storage.zarr3 else None

    def prepare(self) -> None:
        """The folder, in order, on the first process; the others must hear if that fails."""
        problem: OSError | None = None
        if jax.process_index() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if not self.tidied:
                    steps.remove_leftovers(self.folder)
                    steps.set_aside(self.folder, self.start + 1)
            except OSError as error:
                problem = error
        self.tidied = True
        if max(allgather_int(problem is not None)):
            raise problem or SaveFailed("the first process cannot write there")

    def finish(self, step: int) -> None:
        """In the thread of a save: until the step is complete, on disk, and old ones are gone."""
        folder = self.folder / str(step)
        try:
            self.orbax.wait_until_finished()
        except Exception as error:
            self.failed(step, error)
            return
        self.last = step
        self.failures_in_a_row = 0
        LOGGER.info("saved step %d to %s", step, folder)
        try:
            write_digest(folder, jax.process_index(), jax.process_count())
            if jax.process_index() == 0:
                steps.retire(self.folder, self.kept, self.attic)
        except OSError as error:
            LOGGER.warning(
                "step %d is saved, but what follows a save failed: %s", step, reason(error)
            )

    def failed(self, step: int, error: BaseException) -> None:
        self.failure = reason(error)
        self.failures_in_a_row += 1
        with contextlib.suppress(Exception):  # of the same save; the next one starts anew
            self.orbax.wait_until_finished()
        if jax.process_index() == 0:
            for path in self.folder.glob(f"{step}{steps.UNDER_WAY}*"):
                shutil.rmtree(path, ignore_errors=True)
        older = steps.all_steps(self.folder)
        rest = (
            f"the newest checkpoint is of step {older[-1]}"
            if older
            else "there is no checkpoint yet"
        )
        LOGGER.warning(
            "step %d could not be saved to %s: %s; %s", step, self.folder, self.failure, rest
        )

    def wait(self) -> None:
        """Until the save under way is done, well or not."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        self.wait()
        with contextlib.suppress(Exception):  # a failed save was reported
            self.orbax.close()


def quiet_orbax() -> None:
    """Orbax reports failures with tracebacks through absl; here they become one line each."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder in which nothing can be written, before anything else is done. Leaves no
    trace.
    """
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be written: {error.strerror or error}"
        ) from error
