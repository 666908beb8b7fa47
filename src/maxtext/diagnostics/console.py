"""The console output of a run: sections at the start, then progress.

On a terminal: a live bar, and above it a permanent line for the first and the last step, for each
evaluation and every `line_every` steps. In a pipe or a file: one plain line per step. A line looks
like this, without what is unknown:

step 12/100  loss 3.214  lr 3.0e-05  grad 1.20  12,345 tok/s/device  1.2 TFLOP/s/device
  MFU 41.2% of 989 TFLOP/s bf16  0.31 s  eta 2m10s          (on one line)

Steps count from 0, as in all records, so the last of 100 is 99. `grad` is the norm before clipping
if the record has it. The ETA is computed from the wall clock of the last 50 steps: it includes
evaluations and checkpoints, but not the compilation of the first step.
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
from maxtext.diagnostics.record import TIMING, Record

SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
BAR_WIDTH = 16


class Console:
    """Writes records to `stream` (default: standard output). `peak_flops` is the divisor of a
    record's `mfu`.
    """

    def __init__(
        self,
        steps: int,
        peak_flops: float | None = None,
        peak_dtype: str = "bfloat16",
        line_every: int = 100,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps = steps
        self.line_every = line_every
        self.stream = stream or sys.stdout
        self.clock = clock
        self.peak = (
            f"{peak_flops / 1e12:.0f} TFLOP/s {SHORT_DTYPE.get(peak_dtype, peak_dtype)}"
            if peak_flops
            else ""
        )
        self.times: deque[tuple[int, float]] = deque(maxlen=50)  # (step, clock) of records
        self.bar: Bar | None = None
        self.lines_written = 0

    def write(self, record: Record) -> None:
        step = int(record["step"] or 0)
        if (
            not self.times or step > self.times[-1][0]
        ):  # the record of an evaluation repeats its step
            self.times.append((step, self.clock()))
        line = "  ".join(self.parts(record))
        if not is_terminal(self.stream):
            print(line, file=self.stream, flush=True)
            return
        if self.bar is None:  # not earlier: others may print before the first record
            self.bar = Bar(self.stream, self.steps)
        if (
            self.lines_written == 0
            or step % self.line_every == 0
            or step == self.steps - 1
            or "eval_loss" in record
        ):
            self.bar.print(line)
            self.lines_written += 1
        if "loss" in record:
            self.bar.update(step, self.parts(record, short=True))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def parts(self, record: Record, short: bool = False) -> list[str]:
        """The parts of a line; `short` is for the bar, which shows the step itself."""

        def has(name: str) -> bool:
            return record.get(name) is not None

        parts = [] if short else [f"step {record['step']}/{self.steps}"]
        if has("loss"):
            parts.append(f"loss {format_number(record['loss'])}")
        if has("eval_loss"):
            parts.append(f"eval_loss {format_number(record['eval_loss'])}")
        if has("learning_rate") and not short:
            parts.append(f"lr {record['learning_rate']:.1e}")
        norm = "raw_grad_norm" if has("raw_grad_norm") else "grad_norm"
        if has(norm) and not short:
            parts.append(f"grad {format_number(record[norm], decimals=2)}")
        if has("tokens_per_second_per_device"):
            parts.append(f"{record['tokens_per_second_per_device']:,.0f} tok/s/device")
        if has("tflops_per_second_per_device"):
            tflops = format_number(record["tflops_per_second_per_device"], decimals=1)
            parts.append(f"{tflops} TFLOP/s/device")
        parts += self.utilisation(record, short)
        if has("step_time_seconds") and not short:
            parts.append(format_step_time(record["step_time_seconds"] or 0.0))
        eta = self.eta_seconds()
        return parts if eta is None else [*parts, f"eta {format_duration(eta)}"]

    def utilisation(self, record: Record, short: bool) -> list[str]:
        """MFU and its peak; "unknown" without a peak; nothing if the record has no timing."""
        if not any(record.get(name) is not None for name in TIMING):
            return []
        if not self.peak or record.get("mfu") is None:
            return ["MFU unknown"]
        return [f"MFU {record['mfu']:.1%}" + ("" if short else f" of {self.peak}")]

    def eta_seconds(self) -> float | None:
        if len(self.times) < 2:
            return None
        (first, start), (last, now) = self.times[0], self.times[-1]
        return (now - start) / (last - first) * max(self.steps - 1 - last, 0)


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
        self.progress.start()

    def print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def update(self, step: int, parts: list[str]) -> None:
        """Update the bar. A narrow terminal drops parts in the middle, not the loss or the ETA."""
        available = self.console.width - len(f"step {step}/{self.steps} ") - BAR_WIDTH - 1
        while len("  ".join(parts)) > available and len(parts) > 2:
            parts = [*parts[:-2], parts[-1]]
        self.progress.update(self.task, completed=step + 1, step=step, text="  ".join(parts))

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
