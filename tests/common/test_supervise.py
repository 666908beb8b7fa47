"""Groups of processes that start and end together, tested with small Python programs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxtext.common.supervise import Command, GroupExit, Supervisor, first_failures

WAIT = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', "
    "flush=True); time.sleep(60)"
)


def supervise(*programs, **keywords):
    """(GroupExit, seconds)."""
    commands = [Command([sys.executable, "-c", program], os.environ) for program in programs]
    start = time.monotonic()
    return Supervisor(commands, **keywords).run(), time.monotonic() - start


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_lines_have_the_index_of_their_process(capfd):
    program = "import sys; print('a'); print('b'); sys.stderr.write('half a line')"
    ended, _ = supervise(program, "print('ä' * 3)", "import os; os.write(1, b'\\xff\\n')")
    assert ended == GroupExit(0)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] b", "[1] äää", "[2] �"]
    assert err == "[0] half a line\n"


def test_lines_are_copied_at_once(capfd):
    outputs = []
    program = "import time; print('early'); time.sleep(2); print('late')"

    def look():
        time.sleep(1.2)
        outputs.append(capfd.readouterr().out)

    thread = threading.Thread(target=look)
    thread.start()
    supervise(program)
    thread.join()
    assert outputs == ["[0] early\n"]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("raise SystemExit(2)", 2),
    ],
)
def test_failure_stops_the_others_and_gives_the_exit_code(program, code):
    ended, seconds = supervise(WAIT, program, WAIT)
    assert ended == GroupExit(code, failed=(1,))
    assert seconds < 30


def test_finds_the_first_failure_even_if_a_peer_ends_earlier():
    slowly_killed = "import os, time; time.sleep(0.4); os.kill(os.getpid(), 9)"
    ended, _ = supervise(slowly_killed, "raise SystemExit(1)")
    assert ended == GroupExit(137, failed=(0,))


@pytest.mark.slow
def test_kills_processes_that_ignore_sigterm():
    program = "import time; time.sleep(1); raise SystemExit(3)"
    ended, seconds = supervise(STUBBORN, program, failure_grace=1.0)
    assert ended.code == 3
    assert 2 < seconds < 5


def test_early_success_is_no_failure():
    ended, seconds = supervise("pass", "import time; time.sleep(1)")
    assert ended == GroupExit(0)
    assert seconds >= 1


def test_kills_children_of_ended_processes(tmp_path):
    note = tmp_path / "pid"
    program = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(60)']);open({str(note)!r}, 'w').write(str(child.pid)); raise SystemExit(1)"
    )
    ended, seconds = supervise(program)
    assert ended.code == 1
    assert seconds < 5
    wait_until(lambda: not is_alive(int(note.read_text())))


LAUNCHER = """
import os, sys
from maxtext.common.supervise import Command, Supervisor
commands = [Command([sys.executable, "-c", program], os.environ) for program in sys.argv[2:]]
ended = Supervisor(commands, stop_grace=float(sys.argv[1])).run()
print(ended, flush=True)
sys.exit(ended.code)
"""
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: "
    "sys.exit(0));signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); print('ready', "
    "flush=True); time.sleep(60)"
)
LIFELINE = (
    "import os, time; from maxtext.common.supervise import die_with_launcher; "
    "die_with_launcher(os.environ);print(os.getpid(), flush=True); time.sleep(60)"
)


@pytest.fixture
def launcher():
    """A supervisor in its own process, and the first line of each of its processes."""
    started = []

    def begin(grace, *programs):
        line = [sys.executable, "-c", LAUNCHER, str(grace), *programs]
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process, [process.stdout.readline() for _ in programs]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 5)])
def test_forwards_signals_and_returns_the_exit_code(launcher, number, code):
    process, _ = launcher(30, POLITE, POLITE)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert f"stop_signal={number.value})" in out


def test_kills_processes_after_the_grace_period(launcher):
    process, _ = launcher(1, STUBBORN, POLITE)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_second_signal_kills_at_once(launcher):
    process, _ = launcher(60, STUBBORN)
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_processes_end_when_their_launcher_is_killed(launcher):
    process, lines = launcher(60, LIFELINE, LIFELINE)
    children = [int(line.split()[1]) for line in lines]
    assert all(map(is_alive, children))
    process.kill()
    wait_until(lambda: not any(map(is_alive, children)))


def test_first_failures():
    assert first_failures([None, None]) == ()
    assert first_failures([0, None]) == ()
    assert first_failures([None, 1, None, 3]) == (1,)
    assert first_failures([1, -9, -6, None]) == (1,)
    assert first_failures([-9, -9, 1, None]) == (0, 1)
    assert first_failures([None, -6, None]) == (1,)
