"""The report of a load test: latencies and rates as numbers and as text, and a figure.

Of a request with N tokens whose events came at t_1 ... t_k and which was sent at t_0:

    TTFT        t_1 - t_0, time to the first token
    TPOT        (t_k - t_1) / (N - 1), time per output token after the first
    gap         t_(i+1) - t_i, between two events; an event may have several tokens
    end to end  the time of the whole response

Percentiles are interpolated linearly. Failed requests count in `errors` and nowhere else, except
that their tokens are not part of any rate.

`save_load_png` draws the distributions of latencies, and what happened over time.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.common.extras import require
from maxtext.common.files import atomic_writer
from maxtext.common.types import Json
from maxtext.diagnostics.load.client import RequestRecord
from maxtext.diagnostics.load.generator import LoadResult, Workload

PERCENTILES = (50, 90, 99)
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "gap": "gap between events",
    "end_to_end": "end to end",
}


def successful(result: LoadResult) -> list[RequestRecord]:
    return [record for record in result.records if not record.error]


def latencies(records: Sequence[RequestRecord]) -> dict[str, np.ndarray]:
    """Seconds, by the names of TITLES."""
    with_text = [record for record in records if record.event_times]
    several = [record for record in with_text if record.completion_tokens > 1]
    gaps = [np.diff(record.event_times) for record in with_text]
    return {
        "ttft": np.array([record.first_token_seconds for record in with_text]),
        "tpot": np.array([time_per_output_token(record) for record in several]),
        "gap": np.concatenate(gaps) if gaps else np.zeros(0),
        "end_to_end": np.array([record.seconds for record in records]),
    }


def time_per_output_token(record: RequestRecord) -> float:
    return (record.event_times[-1] - record.event_times[0]) / (record.completion_tokens - 1)


def summarize(result: LoadResult, workload: Workload) -> Json:
    """The report of a run, as JSON."""
    records = successful(result)
    seconds = max(result.seconds, 1e-9)
    new_tokens = sum(record.completion_tokens for record in records)
    failed = [record for record in result.records if record.error]
    return {
        "workload": {**asdict(workload), "rate": workload.rate and str(workload.rate)},
        "requests": len(records),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(records) / seconds, 3),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "new_tokens": new_tokens,
        "tokens_per_second": round(new_tokens / seconds, 2),
        "errors": dict(Counter(record.error for record in failed)),
        "first_error": failed[0].message[:300] if failed else None,
        "milliseconds": {
            name: milliseconds(values) for name, values in latencies(records).items() if len(values)
        },
    }


def milliseconds(values: np.ndarray) -> dict[str, float]:
    numbers = {f"p{each}": np.percentile(values, each) for each in PERCENTILES}
    numbers |= {"mean": values.mean(), "max": values.max()}
    return {name: round(float(value) * 1e3, 3) for name, value in numbers.items()}


def table(summary: Json) -> list[list[str]]:
    """Rows of cells: a latency each, in milliseconds."""
    columns = [*(f"p{each}" for each in PERCENTILES), "mean", "max"]
    rows = [["milliseconds", *columns]]
    for name, title in TITLES.items():
        numbers = summary["milliseconds"].get(name)
        cells = [f"{numbers[column]:,.2f}" for column in columns] if numbers else ["-"] * 5
        rows.append([title, *cells])
    return rows


def sentences(summary: Json) -> list[str]:
    """Rates and errors, a line each."""
    lines = [
        f"{summary['requests']:,} requests in {summary['seconds']:,.1f} s: "
        f"{summary['requests_per_second']:,.2f} requests/s, "
        f"{summary['tokens_per_second']:,.1f} new tokens/s",
    ]
    if summary["errors"]:
        counts = ", ".join(f"{count} x {error}" for error, count in summary["errors"].items())
        lines.append(f"errors: {counts} (the first: {summary['first_error']})")
    else:
        lines.append("errors: none")
    return lines


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEATURE = "--plot"
SIZE_INCHES = (11.0, 7.0)
DPI = 130
NUM_BINS = 60  # of the time lines
BLUE, ORANGE, GREEN, RED, GRAY = "#1e60b4", "#e26a1c", "#2a8c4a", "#c62828", "#5f6b7a"


def save_load_png(path: str | os.PathLike, result: LoadResult, title: str = "") -> None:
    """Raises MissingExtra if matplotlib is not installed."""
    figure = load_figure(result, title)
    with atomic_writer(path, "wb") as file:
        figure.savefig(file, format="png")


def load_figure(result: LoadResult, title: str = "") -> "Figure":
    figure = require("matplotlib.figure", FEATURE).Figure(
        figsize=SIZE_INCHES, dpi=DPI, layout="constrained"
    )
    axes = figure.subplots(2, 2)
    values = latencies(successful(result))
    plot_distribution(axes[0, 0], {"time to first token": (values["ttft"], BLUE)})
    gaps = {
        "time per output token": (values["tpot"], BLUE),
        "gap between events": (values["gap"], ORANGE),
    }
    plot_distribution(axes[0, 1], gaps)
    plot_rate(axes[1, 0], result)
    plot_requests(axes[1, 1], result)
    for each in axes.flat:
        each.grid(color="#e9ecf0")
        each.set_axisbelow(True)
        each.spines[["top"]].set_visible(False)
    if title:
        figure.suptitle(title[:140], parse_math=False)
    return figure


def plot_distribution(axes: "Axes", curves: dict[str, tuple[np.ndarray, str]]) -> None:
    """How many percent of the values are below a number of milliseconds, with percentiles."""
    for name, (values, color) in curves.items():
        if not len(values):
            continue
        milliseconds = np.sort(values) * 1e3
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        points = np.percentile(milliseconds, PERCENTILES)
        numbers = ", ".join(
            f"p{each} {format_number(point)}"
            for each, point in zip(PERCENTILES, points, strict=True)
        )
        axes.step(milliseconds, shares, where="post", color=color, label=f"{name}\n{numbers} ms")
        axes.plot(points, PERCENTILES, "o", color=color, markersize=5)
    axes.set_xscale("log")
    label_ticks(axes.xaxis)
    axes.set_ylim(0, 103)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("percent at most")
    if axes.has_data():
        axes.legend(loc="lower right", fontsize="small", framealpha=0.8, edgecolor="none")
    axes.set_title(" and ".join(curves), loc="left")


def format_number(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def label_ticks(axis: Any) -> None:
    """Label powers of ten, with 2 and 5 times these if there are few of them."""
    ticker = require("matplotlib.ticker", FEATURE)
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def plot_rate(axes: "Axes", result: LoadResult) -> None:
    """New tokens a second, and how many requests were open."""
    edges = np.linspace(0, max(result.seconds, 1e-9), NUM_BINS + 1)
    tokens = tokens_by_time(successful(result), result.started_at, edges)
    width = edges[1] - edges[0]
    axes.stairs(tokens / width, edges, fill=True, color=BLUE, alpha=0.35)
    axes.stairs(tokens / width, edges, color=BLUE)
    axes.set_xlabel("seconds")
    axes.set_ylabel("new tokens/s", color=BLUE)
    axes.set_title("throughput and open requests", loc="left")
    twin = axes.twinx()
    starts = np.array([record.started_at for record in result.records]) - result.started_at
    ends = np.array([record.finished_at for record in result.records]) - result.started_at
    num_open = [((starts <= edge) & (ends > edge)).sum() for edge in edges]
    twin.plot(edges, num_open, color=ORANGE)
    twin.set_ylim(bottom=0)
    twin.set_ylabel("open requests", color=ORANGE)
    twin.spines[["top"]].set_visible(False)


def tokens_by_time(records: Sequence[RequestRecord], start: float, edges: np.ndarray) -> np.ndarray:
    """New tokens between each two edges; those of a request are divided evenly among its events."""
    times = [np.array(record.event_times) - start for record in records]
    weights = [
        np.full(len(record.event_times), record.completion_tokens / max(len(record.event_times), 1))
        for record in records
    ]
    if not times:
        return np.zeros(len(edges) - 1)
    return np.histogram(np.concatenate(times), edges, weights=np.concatenate(weights))[0]


def plot_requests(axes: "Axes", result: LoadResult) -> None:
    """The latency of each request, by the time at which it was sent."""
    records = successful(result)
    starts = [record.started_at - result.started_at for record in records]
    first = [record.first_token_seconds * 1e3 for record in records if record.event_times]
    with_text = [start for start, record in zip(starts, records, strict=True) if record.event_times]
    whole = [record.seconds * 1e3 for record in records]
    axes.plot(starts, whole, ".", color=GRAY, markersize=3, label="end to end")
    axes.plot(with_text, first, ".", color=BLUE, markersize=3, label="time to first token")
    failed = [record for record in result.records if record.error]
    if failed:
        axes.plot(
            [record.started_at - result.started_at for record in failed],
            [max(record.seconds * 1e3, 1e-2) for record in failed],
            "x",
            color=RED,
            label=f"failed ({len(failed)})",
        )
    axes.set_yscale("log")
    label_ticks(axes.yaxis)
    axes.set_xlabel("seconds")
    axes.set_ylabel("milliseconds")
    axes.set_title("requests by the time of their arrival", loc="left")
    if axes.has_data():
        axes.legend(loc="best", fontsize="small", framealpha=0.8, edgecolor="none")
