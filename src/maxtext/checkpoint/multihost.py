"""How processes that save together learn that one of them could not write its part.

Orbax lets all processes meet after their writes, and the first one completes the step. A process
whose write failed would never come, and the others would wait for minutes. Here it comes all the
same, says so at the meeting, and the save fails on every process at once. The meetings use the
coordination service of jax.distributed, not the devices, which are busy with the next steps.
"""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from maxtext.common.errors import UserError


class SaveFailed(UserError):
    """A checkpoint could not be written."""


def reason(error: BaseException) -> str:
    """Why a save failed, in one line."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for words in (
        "No space left on device",
        "Disk quota exceeded",
        "Read-only file system",
        "File too large",
    ):
        if words in str(error):
            return words
    return text[:300]


class SaveBarrier:
    """The barrier function for Orbax. `failed` is set by whoever could not write; a save begins
    with `begin`.
    """

    def __init__(self) -> None:
        self.number = 0
        self.failed: BaseException | None = None

    def begin(self) -> None:
        self.number, self.failed = self.number + 1, None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        from jax._src import distributed  # the only door to the coordination service

        client: Any = distributed.global_state.client
        place = f"maxtext/save/{self.number}/{key}"
        if self.failed is not None:
            client.key_value_set(f"{place}/{jax.process_index()}", reason(self.failed))
        client.wait_at_barrier(place, timeout_ms)
        said = client.key_value_dir_get(place)
        if said:
            process, why = said[0]
            raise SaveFailed(
                f"process {process.rpartition('/')[2]} could not write its part: {why}"
            )


class BarrierFuture:
    """A write under way whose failure is told to the meetings instead of raised here."""

    def __init__(self, write: Any, meetings: SaveBarrier):
        self.write, self.meetings = write, meetings

    def result(self, timeout: float | None = None) -> None:
        try:
            self.write.result(timeout)
        except Exception as error:
            self.meetings.failed = error

    def cancel(self) -> None:
        self.write.cancel()


class MultihostHandler(ocp.CompositeCheckpointHandler):
    """Saves items as Orbax does; in a run of several processes no process leaves the others
    waiting.
    """

    def __init__(self, meetings: SaveBarrier, **items: Any):
        self.meetings = meetings
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        super().__init__(composite_options=ocp.CompositeOptions(async_options=options), **items)

    async def async_save(self, directory: Any, args: Any) -> Any:
        writes = await super().async_save(directory, args)
        if jax.process_count() == 1:
            return writes
        return [
            BarrierFuture(write, self.meetings)
            for write in jax.tree.leaves(writes)
            if write is not None
        ]


@ocp.args.register_with_handler(MultihostHandler, for_save=True, for_restore=True)
class Items(ocp.args.Composite):
    """What is saved together, by name."""


def broadcast_from_first(value: int) -> int:
    """What the first process says, on all of them."""
    return (
        value
        if jax.process_count() == 1
        else int(multihost_utils.broadcast_one_to_all(np.int32(value)))
    )


def allgather_int(value: int) -> list[int]:
    """What each process says."""
    return [numbers[0] for numbers in allgather_ints([value], 1)]


def allgather_ints(values: list[int], most: int) -> list[list[int]]:
    """A few whole numbers from 0 on of each process, at most `most`."""
    if jax.process_count() == 1:
        return [values]
    row = np.full(most, -1, np.int32)
    row[: len(values)] = values
    return [[int(one) for one in row if one >= 0] for row in multihost_utils.process_allgather(row)]
