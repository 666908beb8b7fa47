"""Local checkpoints after a kill at any moment."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.checkpoint import steps
from maxtext.checkpoint.local_checkpoints import LocalCheckpointManager

ARRAYS = {("weights", "a"): jnp.arange(6.0)}


@pytest.fixture
def tier(tmp_path):
    return LocalCheckpointManager(tmp_path, "run", "owner", {"data": 1})


def save(tier, step):
    tier.save(step, ARRAYS, {"step": step})
    tier.wait()


@pytest.mark.parametrize("later", [3, 1], ids=["an old step goes", "the run went back"])
def test_kill_during_deletion_leaves_no_partial_step(tier, monkeypatch, later):
    save(tier, 1)
    save(tier, 2)

    def killed(path, **options):
        """After the first file is gone, as a kill between two files would have it."""
        if path.name.startswith(("1", "2")):
            next(path.glob("digest*")).unlink()
        raise OSError("killed")

    monkeypatch.setattr(steps.shutil, "rmtree", killed)
    save(tier, later)
    monkeypatch.undo()
    for step in tier.all_steps():
        assert list((tier.folder / str(step)).glob("digest*")), (
            "a folder with a step's name is whole"
        )
    save(tier, 5)
    assert all(path.name.isdigit() for path in tier.folder.iterdir()), (
        "the next save removes what the kill left"
    )
    arrays, position = tier.restore(5, ARRAYS)
    np.testing.assert_array_equal(arrays["weights", "a"], ARRAYS["weights", "a"])
    assert position == {"step": 5}
