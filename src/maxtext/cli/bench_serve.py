"""`maxtext bench serve`: the load generator, against a server that runs already."""

import asyncio
import json
import sys
import time
from pathlib import Path

from maxtext.cli.arguments import Arguments
from maxtext.cli.terminal import format_table
from maxtext.common import files, progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.extras import require
from maxtext.common.processes import raise_descriptor_limit
from maxtext.diagnostics.load.client import Target
from maxtext.diagnostics.load.generator import LoadGenerator, LoadResult, Workload
from maxtext.diagnostics.load.report import sentences, summarize, table

DEFAULT_STREAMS = 16
DEFAULT_DURATION = 30.0
LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


def run(arguments: Arguments) -> int:
    """Returns 1 if a request failed. Raises ConfigError if the server cannot be used: it needs a
    key, or the address is wrong.
    """
    workload = read_workload(arguments)
    target = Target.from_url(arguments["--url"], arguments["--api-key"])
    if arguments["--plot"] is not None:
        require("matplotlib", "--plot")
    raise_descriptor_limit()
    progress.stop()
    line = ProgressLine(workload)
    timeout, model = arguments["--timeout"], arguments["--model"]
    result = run_in_loop(LoadGenerator(target, workload, timeout, model, line))
    line.clear()
    summary = summarize(result, workload)
    sys.stdout.write(format_table(table(summary), left=1))
    print("\n".join(sentences(summary)))
    write_files(arguments["--json"], arguments["--plot"], result, workload)
    return 1 if summary["errors"] else 0


def write_files(
    json_path: Path | None, plot_path: Path | None, result: LoadResult, workload: Workload
) -> None:
    try:
        if json_path is not None:
            summary = summarize(result, workload)
            files.write_text(json_path, json.dumps(summary, indent=1) + "\n")
        if plot_path is not None:
            from maxtext.diagnostics.load.report import save_load_png

            save_load_png(plot_path, result, describe(workload))
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


def read_workload(arguments: Arguments) -> Workload:
    rate, num_requests = arguments["--rate"], arguments["--requests"]
    if rate == float("inf") and num_requests is None:
        raise ConfigError("--rate inf sends all requests at once: --requests says how many")
    default = Workload()
    return Workload(
        streams=arguments["--streams"] or (DEFAULT_STREAMS if rate is None else None),
        rate=rate,
        num_requests=num_requests,
        duration=arguments["--duration"] or (DEFAULT_DURATION if num_requests is None else None),
        prompt_tokens=arguments["--prompt-tokens"] or default.prompt_tokens,
        new_tokens=arguments["--new-tokens"] or default.new_tokens,
        seed=arguments["--seed"],
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
