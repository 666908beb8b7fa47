"""A signal ends a command with one line and its exit code, whatever the main thread does."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from maxtext.common import signals
from maxtext.common.signals import Interrupted, call_on_signals, interrupt_now, interrupt_on_signals

# Each prints "ready" where the signal is sent. `STUCK` runs no Python for long, like a compiler.
PLAIN = "print('ready', flush=True); time.sleep(60)"
SWALLOWED = """
def callback(phase, info):
    if phase == 'start':
        print('ready', flush=True)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            pass
gc.callbacks.append(callback)
gc.collect()
gc.callbacks.remove(callback)
time.sleep(60)
"""
CAUGHT = """
print('ready', flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
time.sleep(60)
"""
STUCK = (
    "import hashlib; print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', "
    "200_000_000)"
)
CLEANED = """
try:
    print('ready', flush=True)
    time.sleep(60)
finally:
    time.sleep(0.5)
    print('cleaned', flush=True)
"""
IMPORT = """
import os, sys, tempfile
folder = tempfile.mkdtemp()
with open(os.path.join(folder, 'slow_module.py'), 'w') as file:
    file.write("import time; print('ready', flush=True); time.sleep(60)")
sys.path.append(folder)
try:
    import slow_module
finally:
    print('an exception went through the import')
"""
CHILD = """
import gc, signal, sys, time
# A shell that runs tests in the background ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from maxtext.cli import entry, main
def run(args):
    exec({program!r}, globals())
    return 0
main.run = run
entry.entry()
"""


def start(program):
    line = [sys.executable, "-c", CHILD.format(program=program)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    return process


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signal_ends_a_command_with_its_exit_code(number):
    process = start(PLAIN)
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "interrupted\n")
    assert process.returncode == 128 + number


@pytest.mark.parametrize(
    "program", [SWALLOWED, CAUGHT, STUCK, IMPORT], ids=["gc", "except", "compiler", "import"]
)
def test_interrupt_is_never_lost(program):
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "interrupted\n")
    assert process.returncode == 130


def test_cleanup_runs_to_its_end():
    process = start(CLEANED)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("cleaned\n", "interrupted\n")
    assert process.returncode == 143


@pytest.mark.parametrize("program", [PLAIN, STUCK, IMPORT], ids=["plain", "compiler", "import"])
@pytest.mark.parametrize(
    ("number", "message", "code"),
    [(signal.SIGTERM, "stopped early\n", 0), (signal.SIGINT, "interrupted\n", 130)],
)
def test_block_that_may_end_at_any_time_ends_cleanly(program, number, message, code):
    clean = "from maxtext.common.signals import exit_cleanly_on\n"
    clean += f"with exit_cleanly_on({int(signal.SIGTERM)}, 'stopped early'):\n"
    process = start(clean + textwrap.indent(program, "    "))
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", message)
    assert process.returncode == code


def test_second_signal_skips_cleanup():
    process = start(CLEANED.replace("0.5", "60"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    start_time = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "interrupted\n")
    assert process.returncode == 130
    assert time.monotonic() - start_time < 5


def test_callback_replaces_the_interrupt():
    numbers = []
    with interrupt_on_signals():
        with call_on_signals(numbers.append):
            for number in signals.SIGNALS:
                os.kill(os.getpid(), number)
            time.sleep(0.3)
        assert signals.pending() is None
    assert numbers == list(signals.SIGNALS)


def test_consumed_interrupt_is_not_raised_again():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with interrupt_on_signals():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        assert signals.pending() is not None
        signals.consume()
        time.sleep(0.4)  # the watchdog would raise it again
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def test_ignores_sighup_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with (
            interrupt_on_signals(),
            call_on_signals(lambda number: pytest.fail("SIGHUP must be ignored")),
        ):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_interrupt_now_raises_outside_of_a_command():
    with call_on_signals(interrupt_now), pytest.raises(Interrupted) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.exit_code_of(raised.value) == 143
    assert signals.exit_code_of(KeyboardInterrupt()) == 130


@pytest.mark.slow
def test_other_unraisable_errors_are_still_shown():
    class Broken:
        def __del__(self):
            raise ValueError("shown")

    shown = []
    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda details: shown.append(str(details.exc_value)),
    )
    try:
        with interrupt_on_signals():
            Broken()
            gc.collect()
    finally:
        sys.unraisablehook = hook
    assert shown == ["shown"]
