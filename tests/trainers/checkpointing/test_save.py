"""When a run saves, and when failed saves end it: with a saver that writes nothing."""

from types import SimpleNamespace

import pytest

from maxtext.checkpoint.multihost import SaveFailed
from maxtext.trainers.checkpointing import save as module
from maxtext.trainers.checkpointing.save import Save
from maxtext.trainers.loop import Loop


class FakeManager:
    """`full`: whether the disk is full; `saved`: the steps that were written."""

    busy, folder = False, "folder"

    def __init__(self, *arguments):
        self.full, self.failure, self.failures_in_a_row, self.saved = False, None, 0, []
        self.interim = []

    def save(self, step, tree, run, *rest):
        self.failure = "No space left on device" if self.full else None
        self.failures_in_a_row = self.failures_in_a_row + 1 if self.full else 0
        if not self.full:
            self.saved.append(step)
            self.interim += [step] if run["interim"] else []

    def wait(self): ...

    def close(self): ...


class EndlessLoader:
    def __next__(self):
        return 1

    def request_stop(self):
        return False


class State(SimpleNamespace):
    pass


@pytest.fixture
def make(monkeypatch):
    """(hook, loop) that saves every 10 of 100 steps; a step takes `seconds`."""
    monkeypatch.setattr(module, "CheckpointManager", FakeManager)
    monkeypatch.setattr(module, "local_tier", lambda context: None)
    monkeypatch.setattr(module, "trash_folder", lambda config: None)
    monkeypatch.setattr(module, "checkpoints_folder", lambda config: None)
    monkeypatch.setattr(module.StorageOptions, "of", lambda config: None)
    monkeypatch.setattr(module, "describe_run", lambda *arguments: {})
    for name in ("tree_to_save", "model_text"):
        monkeypatch.setattr(module, name, lambda *arguments: None)

    def build(seconds=0.0, **keys):
        config = SimpleNamespace(
            checkpoint_period=10, save_checkpoint_on_completion=True, enable_autocheckpoint=False,
            enable_continuous_checkpointing=False, async_checkpointing=True,
            max_num_checkpoints_to_keep=None, checkpoint_period_minutes=0.0, steps=100,
            save_checkpoint_on_start=False,
        )  # fmt: skip
        vars(config).update(keys)
        source = SimpleNamespace(get_state=lambda: None)
        now = [0.0]
        start = SimpleNamespace(step=0)
        hook = Save(SimpleNamespace(config=config), source, start, clock=lambda: now[0])

        def step(state, batch, key):
            now[0] += seconds
            return State(step=state.step + 1), {"loss": 1.0}

        return hook, Loop(State(step=0), step, EndlessLoader(), None, 100, [hook])

    return build


def test_a_run_that_cannot_save_twice_in_a_row_ends(make):
    hook, loop = make()
    hook.saver.full = True
    loop.run()
    assert loop.step == 21, "the saves of steps 10 and 20 failed"
    with pytest.raises(SaveFailed, match="could not be saved to folder: No space left on device"):
        hook.finish(loop)


@pytest.mark.parametrize(
    ("seconds", "interim"),
    [(0.1, []), (150, [4, 8, 14, 18]), (700, [1, 2, 3, 4, 5, 6, 7, 8, 9, 11])],
)
def test_saves_by_the_clock_between_those_by_steps(make, seconds, interim):
    """After the first step that ends 10 minutes or more after the last save."""
    hook, loop = make(seconds, checkpoint_period_minutes=10.0)
    loop.run()
    hook.finish(loop)
    assert hook.saver.interim[: len(interim)] == interim
    assert set(hook.saver.saved) - set(hook.saver.interim) == set(range(10, 101, 10))


def test_processes_agree_on_saves_by_the_clock_and_seldom_meet(make, monkeypatch):
    """All read the clock of the first after the same steps, with whatever their own clocks say."""
    meetings = []

    def broadcast(value):
        meetings.append(hook.clock())
        return value

    monkeypatch.setattr(module, "broadcast_from_first", broadcast)
    hook, loop = make(1.0, checkpoint_period=10_000, checkpoint_period_minutes=1.0)
    loop.run()
    assert hook.saver.interim == [60]
    assert len([time for time in meetings if time <= 60]) <= 8


def test_a_failed_run_tries_a_last_save(make):
    hook, loop = make()
    hook.saver.full = True
    loop.run()
    hook.saver.full = False
    with pytest.raises(
        SaveFailed, match="2 saves in a row failed.* the same command goes on at step 21"
    ):
        hook.finish(loop)
    assert hook.saver.saved == [21]


def test_a_single_failed_save_does_not_end_the_run(make):
    hook, loop = make()
    save = hook.saver.save

    def sometimes(step, *rest):
        hook.saver.full = step % 20 == 0
        save(step, *rest)

    hook.saver.save = sometimes
    loop.run()
    assert loop.step == 100
    assert hook.saver.saved == [10, 30, 50, 70, 90]


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stopped_run_is_saved_by_default(make, stop):
    for keys, saved in (
        ({}, [3]),
        ({"save_checkpoint_on_completion": False}, []),
        ({"save_checkpoint_on_completion": False, "enable_autocheckpoint": True}, [3]),
    ):
        hook, loop = make(**keys)
        loop.stop_reason = stop
        loop.step = 3
        loop.state = State(step=3)
        hook.positions = {3: None}
        hook.finish(loop)
        assert hook.saver.saved == saved
