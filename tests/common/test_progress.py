"""The spinner: only on a terminal, erased before anything else is written."""

import io
import sys
import time

import pytest

from maxtext.common import progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def make_terminal(monkeypatch):
    """Replaces both streams by a terminal. Called inside the test, because pytest sets its own
    streams after the fixtures.
    """

    def make():
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        return stream

    yield make
    progress.stop()


def screen(stream):
    """What a terminal shows: CLEAR restarts the line."""
    lines = []
    for line in stream.getvalue().split("\n"):
        lines.append(line.rsplit(progress.CLEAR, 1)[-1])
    return "\n".join(lines)


def wait_for(stream, text):
    deadline = time.monotonic() + 5
    while text not in screen(stream):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_is_shown_at_once_and_erased(make_terminal):
    terminal = make_terminal()
    with progress.working("loading"):
        wait_for(terminal, "loading")
    assert screen(terminal) == ""
    assert sys.stdout is sys.stderr is terminal


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_any_text_stops_it(make_terminal, name):
    terminal = make_terminal()
    with progress.working("loading"):
        wait_for(terminal, "loading")
        stream = getattr(sys, name)
        print("first", file=stream)
        assert sys.stdout is sys.stderr is terminal
        print("second", file=stream)
        time.sleep(2 * progress.PERIOD_SECONDS)
    assert screen(terminal) == "first\nsecond\n"


def test_later_text_replaces_the_earlier_one(make_terminal):
    terminal = make_terminal()
    progress.start("loading")
    wait_for(terminal, "loading")
    progress.start("compiling")
    wait_for(terminal, "compiling")
    assert "loading" not in screen(terminal)
    progress.stop()
    assert sys.stdout is sys.stderr is terminal


def test_shows_nothing_without_a_terminal(monkeypatch, make_terminal):
    terminal = make_terminal()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.working("loading"):
        time.sleep(2 * progress.PERIOD_SECONDS)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with progress.working("loading"):
        time.sleep(2 * progress.PERIOD_SECONDS)
    assert terminal.getvalue() == ""
