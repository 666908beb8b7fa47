"""A run's folder belongs to one running process; a dead process does not block it."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from maxtext.common import run_lock
from maxtext.common.errors import UserError
from maxtext.common.run_lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from maxtext.common.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process that holds the lock of tmp_path / "run" until it reads a line."""
    processes = []

    def start():
        line = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_rejects_a_second_process(hold, tmp_path, log_messages):
    first = hold()
    with pytest.raises(
        UserError,
        match=f"run is in use: process {first.pid} on {socket.gethostname()} trains there",
    ):
        RunLock(tmp_path / "run").__enter__()
    assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == first.pid
    first.communicate("\n")
    assert not (tmp_path / "run").exists(), "a lock leaves nothing behind"
    with RunLock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()
    with RunLock(tmp_path / "deep" / "run"):
        pass
    assert not list(tmp_path.iterdir())
    assert not log_messages


def test_takes_over_the_lock_of_a_killed_process(hold, tmp_path, log_messages):
    first = hold()
    first.send_signal(signal.SIGKILL)
    first.wait()
    with RunLock(tmp_path / "run"):
        pass
    assert len(log_messages) == 1
    assert (
        f"left by process {first.pid} on {socket.gethostname()}, which has ended: taken over"
        in log_messages[0]
    )


def test_release_keeps_the_files_of_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    with RunLock(tmp_path / "run"):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}'])
def test_accepts_an_incomplete_lock_file(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_warns_if_the_file_system_has_no_locks(tmp_path, log_messages, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "lockf", unsupported)
    with RunLock(tmp_path / "run"):
        pass
    assert "cannot be locked (Operation not supported)" in log_messages[0]
