"""The hook that saves a run: every so many steps, without pause, and at the end."""

from pathlib import Path

from maxtext.checkpoint.manager import CheckpointManager, StorageOptions
from maxtext.checkpoint.multihost import SaveFailed, broadcast_from_first
from maxtext.checkpoint.open import model_text
from maxtext.checkpoint.state import to_flat_dict
from maxtext.common import signals
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import BatchIterator
from maxtext.trainers.loop import AHEAD, ASKED_ELSEWHERE, Hook, Loop
from maxtext.trainers.restore import (
    Start,
    checkpoints_folder,
    description,
    local_tier,
    tree_to_save,
)
from maxtext.trainers.setup import Setup

FAILURES_IN_A_ROW = 2  # saves that may fail before the run ends


class Save(Hook):
    """A step is saved when it is known to be good: its loss has been read. What is saved of the
    data is the place after the batch of that step."""

    def __init__(self, setup: Setup, source: BatchIterator, start: Start):
        config = setup.config
        self.setup, self.config, self.source = setup, config, source
        folder, kept = checkpoints_folder(config), config.max_num_checkpoints_to_keep
        self.saver = CheckpointManager(
            folder, StorageOptions.of(config), kept, attic(config), start.step
        )
        self.local = local_tier(setup)
        self.places = {
            start.step: source.get_state()
        }  # after the last few steps, one of which may be the last good
        self.begun = start.step  # the newest step that is saved, or was begun to be

    def after_step(self, loop: Loop) -> None:
        if (
            self.gave_up and loop.asked is None
        ):  # all processes stop after the same step, and try once more
            loop.ask_to_stop(f"{FAILURES_IN_A_ROW} saves in a row failed")
        self.places[loop.step] = self.source.get_state()
        self.places.pop(loop.step - AHEAD - 2, None)
        step = loop.step
        due, due_here = (
            self.due(step),
            self.local is not None and step % self.config.local_checkpoint_period == 0,
        )
        if due or due_here:
            loop.wait()
            if loop.step == step:  # else the data ended before it
                self.save(step, loop) if due else self.save_here(step, loop)
            loop.restart_clock()

    def due(self, step: int) -> bool:
        if step % self.config.checkpoint_period == 0:
            return True
        return self.config.enable_continuous_checkpointing and not broadcast_from_first(
            self.saver.busy
        )

    def save(self, step: int, loop: Loop) -> None:
        self.begun = step
        tree = tree_to_save(loop.state, loop.key)
        self.saver.save(
            step, tree, description(self.setup, step), model_text(self.config), self.places[step]
        )
        if not self.config.async_checkpointing:
            self.saver.wait()

    def save_here(self, step: int, loop: Loop) -> None:
        """On this machine's disk."""
        assert self.local is not None
        self.local.save(step, to_flat_dict(tree_to_save(loop.state, loop.key)), self.places[step])

    @property
    def gave_up(self) -> bool:
        return self.saver.failures_in_a_row >= FAILURES_IN_A_ROW

    def finish(self, loop: Loop) -> None:
        """Save where the run ended. Raises SaveFailed where that is not possible, or where the run
        ended because saves had failed."""
        self.saver.wait()
        gave_up = self.gave_up
        step = int(loop.state.step)  # fewer than loop.step where the last ones had no finite loss
        if self.wants_last(loop) and (step != self.begun or self.saver.failure is not None):
            self.save(step, loop)
            self.saver.wait()
        if self.saver.failure is not None:
            raise SaveFailed(
                f"step {self.begun}, the last, could not be saved to {self.saver.folder}: {self.saver.failure}"
            )
        if gave_up:
            raise SaveFailed(
                f"{FAILURES_IN_A_ROW} saves in a row failed, so the run ended; a last one succeeded: free space in "
                f"{self.saver.folder}, then the same command goes on at step {self.begun}"
            )

    def wants_last(self, loop: Loop) -> bool:
        """save_checkpoint_on_completion asks for it at any end, enable_autocheckpoint at a
        signal.
        """
        if self.config.save_checkpoint_on_completion or self.gave_up:
            return True
        stopped = loop.stop in (*signals.NAMES, ASKED_ELSEWHERE)
        if stopped and not self.config.enable_autocheckpoint and loop.step != self.begun:
            LOGGER.warning(
                "%s: not saved, since save_checkpoint_on_completion=false and enable_autocheckpoint=false",
                loop.stop,
            )
        return stopped and self.config.enable_autocheckpoint

    def close(self) -> None:
        self.saver.close()
        if self.local is not None:
            self.local.wait()


def attic(config: MaxTextConfig) -> Path | None:
    """Where old checkpoints go instead of being deleted."""
    if config.checkpoint_todelete_full_path:
        return Path(config.checkpoint_todelete_full_path).expanduser() / config.run_name
    if config.checkpoint_todelete_subdir:
        return checkpoints_folder(config) / config.checkpoint_todelete_subdir
    return None
