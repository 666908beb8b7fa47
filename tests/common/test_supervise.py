"""Processes that live and die together, with small Python programs in their place."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxtext.common.supervise import Command, Ended, Supervisor, first_to_fall

WAIT = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


def supervise(*programs, **keywords):
    """(Ended, seconds)."""
    commands = [Command([sys.executable, "-c", program], os.environ) for program in programs]
    start = time.monotonic()
    return Supervisor(commands, **keywords).run(), time.monotonic() - start


def alive(pid):
    """Running, and not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_lines_carry_the_index_of_their_process(capfd):
    program = "import sys; print('a'); print('b'); sys.stderr.write('half a line')"
    ended, _ = supervise(program, "print('ä' * 3)", "import os; os.write(1, b'\\xff\\n')")
    assert ended == Ended(0)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] b", "[1] äää", "[2] �"]
    assert err == "[0] half a line\n"


def test_a_line_is_passed_on_before_its_process_ends(capfd):
    seen = []
    program = "import time; print('early'); time.sleep(2); print('late')"

    def look():
        time.sleep(1.2)
        seen.append(capfd.readouterr().out)

    thread = threading.Thread(target=look)
    thread.start()
    supervise(program)
    thread.join()
    assert seen == ["[0] early\n"]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("raise SystemExit(2)", 2),
    ],
)
def test_when_one_fails_the_rest_are_stopped_and_its_code_is_told(program, code):
    ended, seconds = supervise(WAIT, program, WAIT)
    assert ended == Ended(code, lost=(1,))
    assert seconds < 30


def test_a_peer_that_is_found_dead_before_the_one_that_it_followed():
    slowly_killed = "import os, time; time.sleep(0.4); os.kill(os.getpid(), 9)"
    ended, _ = supervise(slowly_killed, "raise SystemExit(1)")
    assert ended == Ended(137, lost=(0,))


def test_one_that_ignores_sigterm_is_killed():
    program = "import time; time.sleep(1); raise SystemExit(3)"
    ended, seconds = supervise(STUBBORN, program, failure_grace=1.0)
    assert ended.code == 3
    assert 2 < seconds < 5


def test_an_early_good_end_is_no_failure():
    ended, seconds = supervise("pass", "import time; time.sleep(1)")
    assert ended == Ended(0)
    assert seconds >= 1


def test_what_a_process_started_ends_with_it(tmp_path):
    note = tmp_path / "pid"
    program = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(note)!r}, 'w').write(str(child.pid)); raise SystemExit(1)"
    )
    ended, seconds = supervise(program)
    assert ended.code == 1
    assert seconds < 5
    wait_until(lambda: not alive(int(note.read_text())))


LAUNCHER = """
import os, sys
from maxtext.common.supervise import Command, Supervisor
commands = [Command([sys.executable, "-c", program], os.environ) for program in sys.argv[2:]]
ended = Supervisor(commands, stop_grace=float(sys.argv[1])).run()
print(ended, flush=True)
sys.exit(ended.code)
"""
POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
    "signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(60)"
)
LIFELINE = (
    "import os, time; from maxtext.common.supervise import die_with_launcher; die_with_launcher(os.environ);"
    "print(os.getpid(), flush=True); time.sleep(60)"
)


@pytest.fixture
def launcher():
    """A supervisor in a process of its own, and the first words of its processes."""
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
def test_a_signal_is_passed_on_and_a_good_end_is_one(launcher, number, code):
    process, _ = launcher(30, POLITE, POLITE)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert f"asked={number.value})" in out


def test_after_the_grace_time_they_are_killed(launcher):
    process, _ = launcher(1, STUBBORN, POLITE)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_the_second_signal_does_not_wait(launcher):
    process, _ = launcher(60, STUBBORN)
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_processes_do_not_outlive_a_launcher_that_is_killed(launcher):
    process, lines = launcher(60, LIFELINE, LIFELINE)
    children = [int(line.split()[1]) for line in lines]
    assert all(map(alive, children))
    process.kill()
    wait_until(lambda: not any(map(alive, children)))


def test_who_fell_first():
    assert first_to_fall([None, None]) == ()
    assert first_to_fall([0, None]) == ()
    assert first_to_fall([None, 1, None, 3]) == (1,)
    assert first_to_fall([1, -9, -6, None]) == (1,)
    assert first_to_fall([-9, -9, 1, None]) == (0, 1)
    assert first_to_fall([None, -6, None]) == (1,)
