"""The hook that saves checkpoints (periodically, continuously, at the end), and what they hold."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxtext.checkpoint import steps
from maxtext.checkpoint.manager import INTERIM, CheckpointManager, StorageOptions
from maxtext.checkpoint.multihost import SaveFailed, broadcast_from_first
from maxtext.checkpoint.open import model_text
from maxtext.checkpoint.state import OPTIMIZER, WEIGHTS, to_flat_dict
from maxtext.common import signals
from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.common.trees import unflatten_dict
from maxtext.common.types import Json, Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import BatchIterator
from maxtext.trainers.checkpointing.restore import (
    Start,
    checkpoints_folder,
    layout_of,
    local_tier,
    saved_weights,
)
from maxtext.trainers.hooks import TrainingFailed
from maxtext.trainers.loop import STOPPED_ELSEWHERE, Hook, Loop
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState

MAX_FAILED_SAVES = 2  # consecutive; then the run ends


class Save(Hook):
    """A step is saved only after its loss has been read and is known to be finite. The saved data
    position is that after the batch of the step."""

    def __init__(
        self,
        context: RunContext,
        source: BatchIterator,
        start: Start,
        frozen_checksum: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        config = context.config
        self.context = context
        self.config = config
        self.source = source
        self.frozen_checksum = frozen_checksum
        self.saver = CheckpointManager(
            checkpoints_folder(config),
            StorageOptions.of(config),
            config.max_num_checkpoints_to_keep,
            trash_folder(config),
            start.step,
        )
        self.local = local_tier(context)
        # data positions after the last few steps, one of which may be the last finite one
        self.positions = {start.step: source.get_state()}
        self.last_saved = start.step  # the newest step whose save was started
        self.clock = clock
        self.last_save_time = clock()
        self.next_look = start.step + 1  # the step after which the clock is read
        self.saves_start = (
            config.save_checkpoint_on_start
            and start.step == 0
            and 0 not in steps.all_steps(checkpoints_folder(config))
        )

    def before_step(self, loop: Loop) -> None:
        if self.saves_start:
            self.saves_start = False
            self.save(loop.step, loop)
            loop.restart_clock()

    def after_step(self, loop: Loop) -> None:
        # All processes stop after the same step, and try once more to save.
        if self.has_failed and loop.requested_stop is None:
            loop.request_stop(f"{MAX_FAILED_SAVES} saves in a row failed")
        self.positions[loop.step] = self.source.get_state()
        self.positions.pop(loop.step - loop.max_inflight - 2, None)
        step = loop.step
        is_due = self.is_due(step) or self.is_due_by_the_clock(step)
        is_local_due = self.local is not None and step % self.config.local_checkpoint_period == 0
        if is_due or is_local_due:
            loop.wait()
            if loop.step == step:  # else the data ended before it
                self.save(step, loop) if is_due else self.save_local(step, loop)
            loop.restart_clock()

    def is_due(self, step: int) -> bool:
        if step % self.config.checkpoint_period == 0:
            return True
        return self.config.enable_continuous_checkpointing and not broadcast_from_first(
            self.saver.busy
        )

    def is_due_by_the_clock(self, step: int) -> bool:
        """The same on all processes: they read the first one's clock after the same step, at half
        of the time that is left."""
        period = self.config.checkpoint_period_minutes * 60
        if not period or step < self.next_look or step >= self.config.steps:
            return False
        milliseconds = broadcast_from_first(int((self.clock() - self.last_save_time) * 1000))
        elapsed = max(milliseconds / 1000, 1e-3)
        steps_left = (period - elapsed) * max(step - self.last_saved, 1) / elapsed
        self.next_look = step + max(int(steps_left / 2), 1)
        return elapsed >= period

    def save(self, step: int, loop: Loop, is_last: bool = False) -> None:
        self.last_saved = step
        self.last_save_time = self.clock()
        self.next_look = step + 1
        is_planned = is_last or self.config.enable_continuous_checkpointing
        is_interim = not is_planned and step % self.config.checkpoint_period != 0
        tree = tree_to_save(self.context, loop.state, loop.key)
        self.saver.save(
            step,
            tree,
            describe_run(self.context, step, self.frozen_checksum) | {INTERIM: is_interim},
            model_text(self.config),
            self.positions[step],
        )
        if not self.config.async_checkpointing:
            self.saver.wait()

    def save_local(self, step: int, loop: Loop) -> None:
        """Save on the local disk of this machine."""
        assert self.local is not None
        self.local.save(
            step,
            to_flat_dict(tree_to_save(self.context, loop.state, loop.key)),
            self.positions[step],
        )

    @property
    def has_failed(self) -> bool:
        return self.saver.failures_in_a_row >= MAX_FAILED_SAVES

    def finish(self, loop: Loop) -> None:
        """Save the last state. Raises SaveFailed if that fails, or if the run ended because saves
        had failed."""
        self.saver.wait()
        has_failed = self.has_failed
        step = int(loop.state.step)  # less than loop.step if the last steps were not finite
        if self.should_save_last(loop) and (
            step != self.last_saved or self.saver.failure is not None
        ):
            self.save(step, loop, is_last=True)
            self.saver.wait()
        if self.saver.failure is not None:
            raise SaveFailed(
                f"step {self.last_saved}, the last, could not be saved to {self.saver.folder}: "
                f"{self.saver.failure}"
            )
        if has_failed:
            raise SaveFailed(
                f"{MAX_FAILED_SAVES} saves in a row failed, so the run ended; a last one "
                f"succeeded: free space in {self.saver.folder}, then the same command goes on at "
                f"step {self.last_saved}"
            )

    def should_save_last(self, loop: Loop) -> bool:
        """save_checkpoint_on_completion saves at any end, enable_autocheckpoint after a signal."""
        if self.config.save_checkpoint_on_completion or self.has_failed:
            return True
        was_stopped = loop.stop_reason in (*signals.NAMES, STOPPED_ELSEWHERE)
        if was_stopped and not self.config.enable_autocheckpoint and loop.step != self.last_saved:
            LOGGER.warning(
                "%s: not saved, since save_checkpoint_on_completion=false and "
                "enable_autocheckpoint=false",
                loop.stop_reason,
            )
        return was_stopped and self.config.enable_autocheckpoint

    def close(self) -> None:
        self.saver.close()
        if self.local is not None:
            self.local.wait()


def trash_folder(config: MaxTextConfig) -> Path | None:
    """Where old checkpoints are moved instead of being deleted."""
    if config.checkpoint_todelete_full_path:
        return Path(config.checkpoint_todelete_full_path).expanduser() / config.run_name
    if config.checkpoint_todelete_subdir:
        return checkpoints_folder(config) / config.checkpoint_todelete_subdir
    return None


def describe_run(context: RunContext, step: int, frozen_checksum: int | None = None) -> Json:
    """The metadata of a checkpoint about the run that saves it."""
    config = context.config
    frozen = {} if frozen_checksum is None else {"frozen_checksum": frozen_checksum}
    return {
        "step": step,
        "layout": layout_of(config),
        "optimizer": config.opt_type.value,
        "weight_dtype": config.weight_dtype.value,
        "processes": jax.process_count(),
        "mesh": {axis: size for axis, size in context.rules.mesh.shape.items() if size > 1},
        **frozen,
    }


def tree_to_save(context: RunContext, state: TrainState, key: jax.Array) -> Tree:
    """As abstract_tree, with values. `nonfinite_steps` is not saved: a resumed run starts at 0."""
    weights = saved_weights(context, state.weights)
    leaves = to_flat_dict({"step": state.step, WEIGHTS: weights, OPTIMIZER: state.opt_state})
    return unflatten_dict(leaves) | {"key": jax.random.key_data(key)}


def run_and_save(loop: Loop, save: Save | None) -> UserError | None:
    """Run the loop and save its last state. Returns the reason why the run failed, if it did."""
    failure: UserError | None = None
    try:
        loop.run()
    except TrainingFailed as error:
        error.state = loop.state
        failure = error
    if save is not None:
        try:
            save.finish(loop)
        except SaveFailed as error:
            failure = failure or error
    return failure
