"""The console output of a run: sections at the start, then progress.

On a terminal: a live bar, and above it a permanent line for the first and the last step, for each
evaluation and every `line_every` steps. In a pipe or a file: one plain line per step. Lines show
what the record has, in this order:

step 12/100  loss 3.214  lr 3.0e-05  grad 1.20  12.3k tok/s  0.31 s  eta 2m10s
step 12/100  loss 0.541  margin 0.412  accuracy 75.0%  lr 5.0e-07  0.31 s  eta 2m10s
step 12/100  reward 0.512 ± 0.210  length 143  KL 0.0012  grad 1.20  eta 2m10s

A line has at most LINE_WIDTH columns: parts that do not fit are left out, the first of DROPPED
first, and stay out of later lines, so that columns do not come and go. All metrics are in the
metrics file.

Steps count from 0, as in all records, so the last of 100 is 99. `grad` is the norm before clipping
if the record has it, and tok/s those of all devices. MFU is shown if the peak of the device is
known, the FLOP/s of other accelerators instead, and neither of a CPU. The ETA is computed from the
wall clock of the last 50 steps: it includes evaluations and checkpoints, but not the compilation of
the first step.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich import progress
from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxtext.common.log import LOGGER
from maxtext.diagnostics.record import Record

BAR_WIDTH = 16
LINE_WIDTH = 80
# Parts of a line that may be left out, the first of these first. The loss of reinforcement learning
# is near 0 whatever the policy does.
DROPPED = ("policy loss", "time", "lr", "tok/s", "TFLOP/s", "grad", "MFU", "KL", "length")
EVAL_FIRST = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")


class Console:
    """Writes records to `stream` (default: standard output). `devices`: their number.
    `shows_flops`: show the FLOP/s of a record without `mfu`.
    """

    def __init__(
        self,
        steps: int,
        devices: int = 1,
        shows_flops: bool = False,
        line_every: int = 100,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps = steps
        self.devices = devices
        self.shows_flops = shows_flops
        self.line_every = line_every
        self.stream = stream or sys.stdout
        self.clock = clock
        self.times: deque[tuple[int, float]] = deque(maxlen=50)  # (step, clock) of records
        self.bar: Bar | None = None
        self.lines_written = 0
        self.dropped: set[str] = set()  # parts that did not fit once

    def write(self, record: Record) -> None:
        step = int(record["step"] or 0)
        if (
            not self.times or step > self.times[-1][0]
        ):  # the record of an evaluation repeats its step
            self.times.append((step, self.clock()))
        parts = {"step": f"step {step}/{self.steps}"} | self.parts(record)
        line = fit(parts, LINE_WIDTH, self.dropped)
        if not is_terminal(self.stream):
            print(line, file=self.stream, flush=True)
            return
        if self.bar is None:  # not earlier: others may print before the first record
            self.bar = Bar(self.stream, self.steps)
        if (
            self.lines_written == 0
            or step % self.line_every == 0
            or step == self.steps - 1
            or "loss" not in record
        ):
            self.bar.print(line)
            self.lines_written += 1
        if "loss" in record:
            self.bar.update(step, self.parts(record))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def parts(self, record: Record) -> dict[str, str]:
        """The parts of a line after the step, by name."""
        eta = self.eta_seconds()
        return {
            **quality(record),
            **evaluation(record),
            **optimization(record),
            **self.speed(record),
            **({} if eta is None else {"eta": f"eta {format_duration(eta)}"}),
        }

    def speed(self, record: Record) -> dict[str, str]:
        parts = {}
        if (rate := record.get("tokens_per_second_per_device")) is not None:
            parts["tok/s"] = f"{format_count(rate * self.devices)} tok/s"
        if (mfu := record.get("mfu")) is not None:
            parts["MFU"] = f"MFU {mfu:.1%}"
        elif (rate := record.get("tflops_per_second_per_device")) is not None and self.shows_flops:
            parts["TFLOP/s"] = f"{format_number(rate, decimals=1)} TFLOP/s/device"
        if (seconds := record.get("step_time_seconds")) is not None:
            parts["time"] = format_step_time(seconds)
        return parts

    def eta_seconds(self) -> float | None:
        if len(self.times) < 2:
            return None
        (first, start), (last, now) = self.times[0], self.times[-1]
        return (now - start) / (last - first) * max(self.steps - 1 - last, 0)


def quality(record: Record) -> dict[str, str]:
    """How well a step did, by the metrics of its method."""
    parts = {}
    loss, reward = record.get("loss"), record.get("reward")
    if reward is not None:
        deviation = record.get("reward_std")
        spread = "" if deviation is None else f" ± {format_number(deviation)}"
        parts["reward"] = f"reward {format_number(reward)}{spread}"
    elif loss is not None:
        parts["loss"] = f"loss {format_number(loss)}"
    if (margin := record.get("rewards/margins")) is not None:
        parts["margin"] = f"margin {format_number(margin)}"
    if (accuracy := record.get("rewards/accuracies")) is not None:
        parts["accuracy"] = f"accuracy {accuracy:.1%}"
    if (length := record.get("completions/mean_length")) is not None:
        parts["length"] = f"length {format_count(length)}"
    if (divergence := record.get("kl")) is not None:
        parts["KL"] = f"KL {format_number(divergence)}"
    if reward is not None and loss is not None:
        parts["policy loss"] = f"loss {format_number(loss)}"
    return parts


def evaluation(record: Record) -> dict[str, str]:
    """The metrics of an evaluation, which have `eval_` before their names; EVAL_FIRST first."""
    others = [name for name in record if name.startswith("eval_") and name not in EVAL_FIRST]
    return {
        name: f"{name.replace('eval_rewards/', 'eval_')} {format_number(value)}"
        for name in (*EVAL_FIRST, *others)
        if (value := record.get(name)) is not None
    }


def optimization(record: Record) -> dict[str, str]:
    parts = {}
    if (rate := record.get("learning_rate")) is not None:
        parts["lr"] = f"lr {rate:.1e}"
    norm = record.get("raw_grad_norm", record.get("grad_norm"))
    if norm is not None:
        parts["grad"] = f"grad {format_number(norm, decimals=2)}"
    return parts


def fit(parts: Mapping[str, str], width: int, dropped: set[str]) -> str:
    """The parts of a line, two spaces apart, without those in `dropped`. While the line is wider
    than `width` columns, the next of DROPPED is added to `dropped`. Metrics of an evaluation that
    still do not fit are left out of this line alone."""
    shown = {name: text for name, text in parts.items() if name not in dropped}
    optional = [name for name in DROPPED if name in shown]
    while len(line := "  ".join(shown.values())) > width and optional:
        dropped.add(optional[0])
        del shown[optional.pop(0)]
    extra = [name for name in shown if name.startswith("eval_")][1:]
    while len(line) > width and extra:
        del shown[extra.pop()]
        line = "  ".join(shown.values())
    return line


class Bar:
    """The live line at the bottom of a terminal; printed lines scroll above it."""

    def __init__(self, stream: TextIO, steps: int):
        self.steps = steps
        self.console = RichConsole(file=stream, force_terminal=True, highlight=False)
        columns = (
            progress.TextColumn("step {task.fields[step]}/{task.total}", style="bold"),
            progress.BarColumn(bar_width=BAR_WIDTH),
            progress.TextColumn("{task.fields[text]}"),
        )
        self.progress = progress.Progress(*columns, console=self.console, refresh_per_second=4)
        self.task = self.progress.add_task("", total=steps, step=0, text="")
        # Log lines go through the same console, because others would break the live display.
        self.handlers = [
            (entry, entry.console) for entry in LOGGER.handlers if isinstance(entry, RichHandler)
        ]
        for handler, _ in self.handlers:
            handler.console = self.console
        self.dropped: set[str] = set()
        self.progress.start()

    def print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def update(self, step: int, parts: Mapping[str, str]) -> None:
        """Update the bar, which leaves out what does not fit into the terminal."""
        available = self.console.width - len(f"step {step}/{self.steps} ") - BAR_WIDTH - 1
        text = fit(parts, available, self.dropped)
        self.progress.update(self.task, completed=step + 1, step=step, text=text)

    def close(self) -> None:
        self.progress.stop()
        for handler, console in self.handlers:
            handler.console = console


def start_banner(sections: Mapping[str, Mapping[str, str]], stream: TextIO | None = None) -> None:
    """Print sections (Model, Mesh, Plan) of names and values: boxes on a terminal, else indented
    text.
    """
    stream = stream or sys.stdout
    if not is_terminal(stream):
        for title, section in sections.items():
            width = max(map(len, section), default=0)
            body = "".join(f"  {name:<{width}}  {value}\n" for name, value in section.items())
            print(f"{title}\n{body}", end="", file=stream, flush=True)
        return
    boxes = []
    for title, section in sections.items():
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value in section.items():
            grid.add_row(Text(name), Text(value))
        boxes.append(
            Panel(
                grid,
                title=f"[bold]{title}[/bold]",
                title_align="left",
                border_style="blue",
                expand=False,
            )
        )
    RichConsole(file=stream, force_terminal=True, highlight=False).print(Columns(boxes))


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def format_number(value: float | int | None, decimals: int = 3) -> str:
    """Fixed decimals for 0.1 to 10,000, so that lines align; else three significant digits."""
    value = float("nan") if value is None else value
    return f"{value:.{decimals}f}" if 0.1 <= abs(value) < 10_000 or value == 0 else f"{value:.3g}"


def format_count(value: float) -> str:
    """143, 9,876, 12.3k, 1.23M."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:.1f}k" if value < 999_950 else f"{value / 1e6:.2f}M"


def format_step_time(seconds: float) -> str:
    """31.2 ms, 0.31 s, 45 s; longer as by format_duration."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"
    return format_duration(seconds)


def format_duration(seconds: float) -> str:
    """45s, 2m10s, 3h05m, 2d04h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"
