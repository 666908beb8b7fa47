"""The console says what is known, with its convention, and nothing that is not."""

import io
import logging
import re

import pytest
from rich.console import Console as RichConsole
from rich.logging import RichHandler

from maxtext.common.log import LOGGER
from maxtext.diagnostics.console import (
    Console,
    format_count,
    format_number,
    format_step_time,
    start_banner,
)

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


RL_RECORD = RECORD | {
    "loss": 0.0123,
    "reward": 0.5121,
    "reward_std": 0.21,
    "kl": 0.00123,
    "completions/mean_length": 143.2,
}
PREFERENCES = RECORD | {"rewards/margins": 0.4123, "rewards/accuracies": 0.75}
CPU_TIMING = {"mfu": None, "tflops_per_second_per_device": 3e-5}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            RECORD | CPU_TIMING,
            "step 12/100  loss 3.214  lr 3.0e-05  grad 1.20  12.3k tok/s  0.31 s  eta 2m54s",
        ),
        (RECORD, "step 12/100  loss 3.214  grad 1.20  12.3k tok/s  MFU 41.2%  eta 2m54s"),
        (
            RL_RECORD | CPU_TIMING,
            "step 12/100  reward 0.512 ± 0.210  length 143  KL 0.00123  grad 1.20  eta 2m54s",
        ),
        (
            PREFERENCES | CPU_TIMING,
            "step 12/100  loss 3.214  margin 0.412  accuracy 75.0%  grad 1.20  eta 2m54s",
        ),
    ],
    ids=["cpu", "gpu", "reinforcement learning", "preferences"],
)
def test_line_in_a_pipe(record, line):
    _, second = piped({**record, "step": 11}, record)  # 87 steps of 2 s are to come
    assert second == line
    assert len(second) <= 80


def test_lines_of_long_runs_fit_and_keep_their_columns():
    """What the first line has no space for is missing in shorter lines, too."""
    short = RL_RECORD | {"reward": -12345.6, "reward_std": 9876.5}
    stream = io.StringIO()
    console = Console(100_000, stream=stream, clock=Clock(), devices=8)
    for step, record in enumerate([RL_RECORD, short, RL_RECORD], start=99_990):
        console.write({**record, "step": step})
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    names = [re.findall("[a-zA-Z]+(?= )", line) for line in lines]
    assert names[1] == names[2] == ["step", "reward", "length", "KL", "eta"]


def test_tokens_are_those_of_all_devices():
    assert "  98.8k tok/s  " in piped(RECORD, RECORD, devices=8)[0]


def test_evaluation_of_preferences_shows_margin_and_accuracy():
    names = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    record = {"step": 12} | {f"eval_{name}": 0.5 for name in names} | {"eval_logps/chosen": -9.0}
    (line,) = piped(record)
    assert line.startswith(
        "step 12/100  eval_loss 0.500  eval_margins 0.500  eval_accuracies 0.500"
    )
    assert len(line) <= 80


def test_eta_of_the_first_and_the_last_step():
    first, last = piped({**RECORD, "step": 98}, {**RECORD, "step": 99})
    assert "eta" not in first
    assert last.endswith("eta 0s")


def test_flops_are_shown_for_accelerators_without_a_known_peak_only():
    (accelerator,) = piped({**RECORD, "mfu": None}, shows_flops=True)
    assert "  407.5 TFLOP/s/device" in accelerator
    assert "MFU" not in accelerator
    (cpu,) = piped(RECORD | CPU_TIMING)
    assert "MFU" not in cpu
    assert "FLOP" not in cpu
    hidden = dict.fromkeys(
        ("step_time_seconds", "tokens_per_second_per_device", "tflops_per_second_per_device", "mfu")
    )
    assert piped({**RECORD, **hidden}, shows_flops=True) == [
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
    ("value", "text"), [(143.2, "143"), (9876, "9,876"), (12345, "12.3k"), (1234567, "1.23M")]
)
def test_format_count(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.2141, "3.214"), (0.01234, "0.0123"), (0, "0.000"), (5e6, "5e+06")]
)
def test_format_number(value, text):
    assert format_number(value) == text


def test_terminal_has_a_bar_and_permanent_lines(terminal):
    console = Console(10, line_every=4, stream=terminal, clock=Clock())
    for step in range(10):
        console.write({**RECORD, "step": step})
        if step == 5:
            console.write({"step": 5, "eval_loss": 2.0})
    console.close()
    text = plain_text(terminal)
    stay = re.findall(r"\rstep (\d+)/10  (loss|eval_loss)", text)
    assert stay == [("0", "loss"), ("4", "loss"), ("5", "eval_loss"), ("8", "loss"), ("9", "loss")]
    assert re.search(
        r"step 9/10 ━+ loss 3.214  lr 3.0e-05  grad 1.20  12.3k tok/s  MFU 41.2%  0.31 s  eta 0s",
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
        r"\rstep 1/10 [━╺╸]+ loss 3.214  grad 1.20  MFU 41.2%  eta 16s", plain_text(terminal)
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
