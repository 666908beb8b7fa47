"""Multi-process saves: if one process cannot write its part, the save fails on all of them at once.

Orbax lets all processes meet at a barrier after their writes, and the first process then completes
the step. A process whose write failed would never reach the barrier, and the others would wait for
minutes. Here it reaches the barrier, reports the failure there, and the save fails on every
process. The barrier uses the coordination service of jax.distributed instead of the devices, which
are busy with the next steps.
"""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from maxtext.common.errors import UserError

DISK_ERRORS = (
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "File too large",
)


class SaveFailed(UserError):
    """A checkpoint could not be written."""


def error_summary(error: BaseException) -> str:
    """Why a save failed, in one line."""
    for message in DISK_ERRORS:
        if message in str(error):
            return message
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class SaveBarrier:
    """The barrier function for Orbax. A save starts with `begin`; a process that cannot write its
    part sets `error`.
    """

    def __init__(self) -> None:
        self.save_count = 0
        self.error: BaseException | None = None

    def begin(self) -> None:
        self.save_count += 1
        self.error = None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        from jax._src import distributed  # JAX has no public access to the coordination service

        client: Any = distributed.global_state.client
        barrier = f"maxtext/save/{self.save_count}/{key}"
        if self.error is not None:
            client.key_value_set(f"{barrier}/{jax.process_index()}", error_summary(self.error))
        client.wait_at_barrier(barrier, timeout_ms)
        errors = client.key_value_dir_get(barrier)
        if errors:
            process, message = errors[0]
            raise SaveFailed(
                f"process {process.rpartition('/')[2]} could not write its part: {message}"
            )


class BarrierFuture:
    """An asynchronous write whose failure is reported at the barrier instead of raised here."""

    def __init__(self, write: Any, barrier: SaveBarrier):
        self.write = write
        self.barrier = barrier

    def result(self, timeout: float | None = None) -> None:
        try:
            self.write.result(timeout)
        except Exception as error:
            self.barrier.error = error

    def cancel(self) -> None:
        self.write.cancel()


class MultihostHandler(ocp.CompositeCheckpointHandler):
    """Saves items as Orbax does. In a run of several processes, no failure leaves the others
    waiting at the barrier.
    """

    def __init__(self, barrier: SaveBarrier, **items: Any):
        self.barrier = barrier
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        super().__init__(composite_options=ocp.CompositeOptions(async_options=options), **items)

    async def async_save(self, directory: Any, args: Any) -> Any:
        writes = await super().async_save(directory, args)
        if jax.process_count() == 1:
            return writes
        return [
            BarrierFuture(write, self.barrier)
            for write in jax.tree.leaves(writes)
            if write is not None
        ]


@ocp.args.register_with_handler(MultihostHandler, for_save=True, for_restore=True)
class CompositeArgs(ocp.args.Composite):
    """The save arguments of each item of a step, by name."""


def broadcast_from_first(value: int) -> int:
    """The value that the first process has, on all processes."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def allgather_int(value: int) -> list[int]:
    """The value of each process."""
    return [values[0] for values in allgather_ints([value], 1)]


def allgather_ints(values: list[int], max_length: int) -> list[list[int]]:
    """The lists of all processes: non-negative integers, at most `max_length` of each process."""
    if jax.process_count() == 1:
        return [values]
    padded = np.full(max_length, -1, np.int32)
    padded[: len(values)] = values
    gathered = multihost_utils.process_allgather(padded)
    return [[int(value) for value in row if value >= 0] for row in gathered]
