"""A figure of a load test: distributions of latencies, and what happened over time."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext.common.extras import require
from maxtext.common.files import atomic_writer
from maxtext.diagnostics.load.client import RequestRecord
from maxtext.diagnostics.load.generator import LoadResult
from maxtext.diagnostics.load.report import PERCENTILES, latencies, successful

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
