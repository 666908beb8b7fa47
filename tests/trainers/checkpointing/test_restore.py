"""Which checkpoint a run starts from."""

from types import SimpleNamespace

import pytest

from maxtext.common.errors import UserError
from maxtext.trainers.checkpointing import restore


class Local:
    """A step on the local disk."""

    def __init__(self, step, fits=True):
        self.step, self.fits, self.tried = step, fits, 0

    def after(self, shared):
        if self.step is None or self.step <= shared:
            return None
        step, self.step = self.step, None
        self.tried += 1
        return SimpleNamespace(step=step) if self.fits else None


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """(shared steps, damaged ones, a local one) -> the step that is restored."""

    def run(shared, damaged=(), local=None):
        broken = {str(step) for step in damaged}
        monkeypatch.setattr(
            restore, "verify", lambda path, *_: ["it is damaged"] if path.name in broken else []
        )
        monkeypatch.setattr(restore, "read_state", lambda context, stored: (None, None))
        monkeypatch.setattr(restore, "SavedStep", lambda path: SimpleNamespace(step=int(path.name)))
        newest = restore.restore_newest(None, [tmp_path / str(step) for step in shared], local)
        return newest[-1].step if isinstance(newest, tuple) else newest.step if newest else None

    return run


def test_restores_the_newest_intact_step_shared_or_local(choose):
    assert choose([5, 10]) == 10
    assert choose([5, 10], local=Local(8)) == 10
    assert choose([5, 10], local=Local(12)) == 12
    assert choose([5, 10], damaged=[10], local=Local(8)) == 8
    assert choose([5, 10], damaged=[10], local=Local(3)) == 5
    assert choose([5, 10], damaged=[5, 10], local=Local(3)) == 3
    assert choose([], local=Local(3)) == 3
    assert choose([]) is None


def test_a_local_step_that_does_not_fit_is_tried_once(choose):
    local = Local(12, fits=False)
    assert choose([5, 10], damaged=[10], local=local) == 5
    assert local.tried == 1


def test_many_damaged_steps_are_counted_and_not_listed(choose):
    with pytest.raises(UserError, match="steps 2, 6 are damaged"):
        choose([2, 6], damaged=[2, 6])
    many = list(range(10, 1340, 10))
    with pytest.raises(UserError, match="all 133 steps from 10 to 1330 are damaged") as raised:
        choose(many, damaged=many)
    assert len(str(raised.value)) < 300
