"""`maxtext bench serve`: the load generator, against a server that runs already."""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext.cli import arguments
from maxtext.cli.terminal import format_table
from maxtext.common import files, progress
from maxtext.common.descriptors import raise_descriptor_limit
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.extras import require
from maxtext.diagnostics.load.client import Target
from maxtext.diagnostics.load.generator import LoadGenerator, LoadResult, Workload
from maxtext.diagnostics.load.report import sentences, summarize, table

KEY_VARIABLE = "MAXTEXT_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_STREAMS = 16
DEFAULT_DURATION = 30.0
LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


@dataclass(frozen=True)
class BenchArguments:
    target: Target
    workload: Workload
    model: str | None
    timeout: float
    json_path: Path | None
    plot_path: Path | None


def run(args: list[str]) -> int:
    """Returns 1 if a request failed. Raises ConfigError if the server cannot be used: it needs a
    key, or the address is wrong.
    """
    parsed = parse_arguments(args)
    if parsed.plot_path is not None:
        require("matplotlib", "--plot")
    raise_descriptor_limit()
    progress.stop()
    line = ProgressLine(parsed.workload)
    generator = LoadGenerator(parsed.target, parsed.workload, parsed.timeout, parsed.model, line)
    result = run_in_loop(generator)
    line.clear()
    summary = summarize(result, parsed.workload)
    sys.stdout.write(format_table(table(summary), left=1))
    print("\n".join(sentences(summary)))
    write_files(parsed, result, summary)
    return 1 if summary["errors"] else 0


def write_files(parsed: BenchArguments, result: LoadResult, summary: dict[str, Any]) -> None:
    try:
        if parsed.json_path is not None:
            files.write_text(parsed.json_path, json.dumps(summary, indent=1) + "\n")
        if parsed.plot_path is not None:
            from maxtext.diagnostics.load.plot import save_load_png

            save_load_png(parsed.plot_path, result, describe(parsed.workload))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror or error}") from error


def run_in_loop(generator: LoadGenerator) -> LoadResult:
    """Run the generator, on uvloop if that is installed: it needs about half of the CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(generator.run())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(generator.run())


def parse_arguments(args: list[str]) -> BenchArguments:
    """Raises ConfigError for the first flag that is wrong."""
    args = list(args)
    url = arguments.take_value(args, "--url") or DEFAULT_URL
    api_key = arguments.take_value(args, "--api-key") or os.environ.get(KEY_VARIABLE) or None
    model = arguments.take_value(args, "--model")
    timeout = arguments.take_positive(args, "--timeout") or 600.0
    json_path = take_path(args, "--json")
    plot_path = take_path(args, "--plot")
    workload = parse_workload(args)
    if args:
        raise ConfigError(
            f"unknown argument {args[0]!r}; `maxtext bench --help` lists the flags of bench serve"
        )
    return BenchArguments(
        target=Target.from_url(url, api_key),
        workload=workload,
        model=model,
        timeout=timeout,
        json_path=json_path,
        plot_path=plot_path,
    )


def take_path(args: list[str], option: str) -> Path | None:
    text = arguments.take_value(args, option)
    return None if text is None else files.local_path(text)


def parse_workload(args: list[str]) -> Workload:
    streams = arguments.take_number(args, "--streams", 1)
    rate = arguments.take_positive(args, "--rate", allow_infinite=True)
    num_requests = arguments.take_number(args, "--requests", 1)
    duration = arguments.take_positive(args, "--duration")
    if streams is not None and rate is not None:
        raise ConfigError("--streams is a closed loop and --rate an open one: give one of them")
    if num_requests is not None and duration is not None:
        raise ConfigError("--requests and --duration both end the run: give one of them")
    if rate == float("inf") and num_requests is None:
        raise ConfigError("--rate inf sends all requests at once: --requests says how many")
    if streams is None and rate is None:
        streams = DEFAULT_STREAMS
    if num_requests is None and duration is None:
        duration = DEFAULT_DURATION
    default = Workload()
    return Workload(
        streams=streams,
        rate=rate,
        num_requests=num_requests,
        duration=duration,
        prompt_tokens=arguments.take_range(args, "--prompt-tokens") or default.prompt_tokens,
        new_tokens=arguments.take_range(args, "--new-tokens") or default.new_tokens,
        seed=arguments.take_number(args, "--seed", 0) or 0,
    )


def describe(workload: Workload) -> str:
    def span(limits: tuple[int, int]) -> str:
        low, high = limits
        return f"{low}" if low == high else f"{low}-{high}"

    load = f"{workload.streams} streams"
    if workload.rate is not None:
        load = f"{workload.rate:g} requests/s"
    return (
        f"{load}, prompts of {span(workload.prompt_tokens)} tokens, "
        f"completions of {span(workload.new_tokens)}"
    )


class ProgressLine:
    """A line on standard error: redrawn each second on a terminal, else written now and then."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.written_at = 0.0

    def __call__(self, result: LoadResult) -> None:
        now = time.perf_counter()
        is_terminal = sys.stderr.isatty()
        if not is_terminal and now - max(self.written_at, result.started_at) < LINE_SECONDS:
            return
        self.written_at = now
        finished = [record for record in result.records if record.finished_at]
        num_open = len(result.records) - len(finished)
        errors = sum(bool(record.error) for record in finished)
        seconds = now - result.started_at
        tokens = sum(record.completion_tokens for record in finished)
        of_all = f" of {self.workload.num_requests:,}" if self.workload.num_requests else ""
        text = (
            f"{seconds:.0f} s: {len(finished):,}{of_all} requests done, {num_open:,} open, "
            f"{tokens / seconds:,.0f} tokens/s, {errors} errors"
        )
        sys.stderr.write(f"\r\x1b[K{text}" if is_terminal else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
