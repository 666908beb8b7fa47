"""The console says what is known, with its convention, and nothing that is not."""

import io
import logging
import re

import pytest
from rich.console import Console as RichConsole
from rich.logging import RichHandler

from maxtext.common.log import LOGGER
from maxtext.diagnostics.console import Console, format_number, format_step_time, start_banner

RECORD = {
    "step": 12,
    "loss": 3.2141,
    "learning_rate": 3e-5,
    "grad_norm": 1.0,
    "raw_grad_norm": 1.2,
    "param_norm": 9.0,
    "step_time_seconds": 0.31,
    "tokens_per_second_per_device": 12345.4,
    "tflops_per_second_per_device": 407.5,
    "mfu": 0.412,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Two seconds a reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    return Terminal()


def plain_text(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def piped(*records, **options) -> list[str]:
    stream = io.StringIO()
    console = Console(100, stream=stream, clock=Clock(), **options)
    for record in records:
        console.write(record)
    console.close()
    return stream.getvalue().splitlines()


def test_line_in_a_pipe():
    _, line = piped({**RECORD, "step": 11}, RECORD, peak_flops=989.4e12)
    assert line == (
        "step 12/100  loss 3.214  lr 3.0e-05  grad 1.20  12,345 tok/s/device  407.5 "
        "TFLOP/s/device  MFU 41.2% of 989 TFLOP/s bf16  0.31 s  eta 2m54s"  # 87 steps of 2 s
    )


def test_eta_of_the_first_and_the_last_step():
    first, last = piped({**RECORD, "step": 98}, {**RECORD, "step": 99})
    assert "eta" not in first
    assert last.endswith("eta 0s")


def test_mfu_is_unknown_without_a_peak_and_absent_without_timing():
    (no_peak,) = piped(RECORD)
    assert "  MFU unknown  " in no_peak
    assert "%" not in no_peak
    (no_mfu,) = piped({**RECORD, "mfu": None}, peak_flops=1e12, peak_dtype="float32")
    assert "  MFU unknown  " in no_mfu
    hidden = dict.fromkeys(
        ("step_time_seconds", "tokens_per_second_per_device", "tflops_per_second_per_device", "mfu")
    )
    assert piped({**RECORD, **hidden}, peak_flops=1e12) == [
        "step 12/100  loss 3.214  lr 3.0e-05  grad 1.20"
    ]


def test_evaluation_does_not_change_the_eta():
    lines = piped({**RECORD, "step": 11}, RECORD, {"step": 12, "eval_loss": 3.5})
    assert lines[2] == "step 12/100  eval_loss 3.500  eta 2m54s"


def test_shows_nan():
    (line,) = piped({"step": 0, "loss": float("nan")})
    assert line == "step 0/100  loss nan"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0312, "31.2 ms"),
        (0.31, "0.31 s"),
        (45.2, "45 s"),
        (59.7, "1m00s"),
        (130, "2m10s"),
        (3599.9, "1h00m"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_format_step_time(seconds, text):
    assert format_step_time(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.2141, "3.214"), (0.01234, "0.0123"), (0, "0.000"), (5e6, "5e+06")]
)
def test_format_number(value, text):
    assert format_number(value) == text


def test_terminal_has_a_bar_and_permanent_lines(terminal):
    console = Console(10, peak_flops=989.4e12, line_every=4, stream=terminal, clock=Clock())
    for step in range(10):
        console.write({**RECORD, "step": step})
        if step == 5:
            console.write({"step": 5, "eval_loss": 2.0})
    console.close()
    text = plain_text(terminal)
    stay = re.findall(r"\rstep (\d+)/10  (loss|eval_loss)", text)
    assert stay == [("0", "loss"), ("4", "loss"), ("5", "eval_loss"), ("8", "loss"), ("9", "loss")]
    assert re.search(
        r"step 9/10 ━+ loss 3.214  12,345 tok/s/device  407.5 TFLOP/s/device  MFU 41.2%  eta 0s",
        text,
    )
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_narrow_terminal_keeps_loss_and_eta(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    console = Console(10, stream=terminal, clock=Clock())
    for step in range(2):
        console.write({**RECORD, "step": step})
    console.close()
    assert re.search(
        r"\rstep 1/10 [━╺╸]+ loss 3.214  12,345 tok/s/device  eta 16s", plain_text(terminal)
    )


def test_dumb_terminal_has_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    Console(100, stream=terminal).write(RECORD)
    assert "\x1b" not in terminal.getvalue()


def test_log_goes_through_the_bar(terminal):
    before = RichConsole(file=io.StringIO())
    handler = RichHandler(console=before)
    LOGGER.addHandler(handler)
    try:
        console = Console(10, stream=terminal)
        console.write({"step": 0, "loss": 1.0})
        LOGGER.log(logging.ERROR, "saved a checkpoint")
        console.close()
        assert "saved a checkpoint" in plain_text(terminal)
        assert handler.console is before
    finally:
        LOGGER.removeHandler(handler)


def test_banner_in_a_pipe_and_on_a_terminal(terminal):
    sections = {
        "Model": {"parameters": "8.03 B", "FLOPs a token": "[48.2 G]"},
        "Mesh": {"data": "8"},
    }
    stream = io.StringIO()
    start_banner(sections, stream)
    assert (
        stream.getvalue()
        == "Model\n  parameters     8.03 B\n  FLOPs a token  [48.2 G]\nMesh\n  data  8\n"
    )
    start_banner(sections, terminal)
    text = plain_text(terminal)
    assert all(
        part in text for part in ("─ Model ─", "─ Mesh ─", "parameters", "8.03 B", "[48.2 G]")
    )
