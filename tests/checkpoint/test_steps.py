"""The step folders of a run's checkpoints: which are complete, and how old ones are removed."""

import errno
import os
from pathlib import Path

import pytest

from maxtext.checkpoint import steps


@pytest.fixture
def folder(tmp_path):
    """Steps 5, 10 and 20, and leftovers of killed processes, one of an earlier version."""
    leftovers = ("25.orbax-checkpoint-tmp", "4.deleting", "3.going", "15.damaged")
    for name in ("5", "10", "20", *leftovers):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "file").write_text(name)
        (tmp_path / name / steps.METADATA_FILE).write_text("{}")
    (tmp_path / "30").mkdir()  # without Orbax's mark
    (tmp_path / "notes").mkdir()
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_lists_complete_steps_only(folder):
    assert steps.all_steps(folder) == [5, 10, 20]
    left = [path.name for path in steps.incomplete_steps(folder)]
    assert left == ["15.damaged", "25.orbax-checkpoint-tmp", "3.going", "30", "4.deleting"]
    assert steps.all_steps(folder / "nowhere") == []


def test_find_steps_accepts_step_checkpoints_and_run_folders(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    os.rename(folder, run / "checkpoints")
    inside = run / "checkpoints"
    assert [path.name for path in steps.find_steps(run)] == ["5", "10", "20"]
    assert steps.find_steps(run) == steps.find_steps(inside)
    assert steps.find_steps(inside / "10") == [inside / "10"]
    assert steps.has_steps(run)
    assert not steps.has_steps(inside / "notes")


def test_remove_leftovers_keeps_steps(folder):
    steps.remove_leftovers(folder)
    assert names(folder) == ["10", "15.damaged", "20", "30", "5", "notes"]


def test_deletes_oldest_steps(folder):
    steps.remove_old_steps(folder, 2, None)
    assert steps.all_steps(folder) == [10, 20]
    steps.remove_old_steps(folder, None, None)
    assert steps.all_steps(folder) == [10, 20]


def test_kill_during_delete_leaves_no_partial_step(folder, monkeypatch):
    def killed(path, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        steps.remove_old_steps(folder, 2, None)
    assert steps.all_steps(folder) == [10, 20]
    assert (folder / "5.deleting").exists()
    monkeypatch.undo()
    steps.remove_leftovers(folder)
    assert not (folder / "5.deleting").exists()


def test_moves_old_steps_to_the_archive(folder, tmp_path_factory):
    archive = tmp_path_factory.mktemp("archive") / "old"
    (archive / "5").mkdir(parents=True)
    steps.remove_old_steps(folder, 1, archive)
    assert steps.all_steps(folder) == [20]
    assert names(archive) == ["10", "5", "5.1"]
    assert (archive / "5.1" / "state" / "file").read_text() == "5"


def test_sets_aside_steps_after_the_restored_one(folder):
    steps.set_aside_damaged(folder, 15)
    assert steps.all_steps(folder) == [5, 10]
    assert (folder / "20.damaged" / "state" / "file").read_text() == "20"


def test_kill_during_copy_to_archive_leaves_no_partial_step(folder, tmp_path_factory, monkeypatch):
    archive = tmp_path_factory.mktemp("archive")
    rename = os.rename

    def other_disk(source, target):
        if Path(target).parent == archive and Path(source).parent == folder:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    def killed(path, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.os, "rename", other_disk)
    complete = steps.all_steps(folder)
    with monkeypatch.context() as patch:
        patch.setattr(steps.shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            steps.remove_old_steps(folder, 1, archive)
    assert steps.all_steps(folder) == complete
    steps.remove_old_steps(folder, 1, archive)
    assert steps.all_steps(folder) == complete[-1:]
    assert steps.all_steps(archive) == complete[:-1]
