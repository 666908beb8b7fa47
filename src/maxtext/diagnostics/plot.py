"""loss.png: training and evaluation loss over the steps, drawn with matplotlib (extra `plot`).
reward.png of reinforcement learning is drawn in the same way, without a logarithmic scale.

The loss of each step is drawn pale, a moving average on top of it, evaluations as markers. The
legend has the last value of each curve; that of the training loss equals the one in summary.json.
Non-finite losses are left out. The y axis ends at the 99.5th percentile, so that spikes leave the
frame instead of flattening the curve, and the moving average counts them as that percentile.
"""

import math
import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from maxtext.common.extras import require
from maxtext.common.files import atomic_writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (9.0, 5.0)
DPI = 150
RAW_COLOR, SMOOTH_COLOR, EVAL_COLOR = "#a9c8ec", "#1e60b4", "#e26a1c"
LOG_SCALE_FROM = 10.0  # ratio of the largest to the smallest loss
LOSS, REWARD = "loss (nats per token)", "mean reward"  # labels of the y axis
AGG_CHUNK_POINTS = 10_000  # Agg fails on very long paths unless it may split them

Points = tuple[np.ndarray, np.ndarray]


def save_loss_png(
    path: str | os.PathLike,
    steps: Sequence[int],
    losses: Sequence[float | None],
    eval_points: Iterable[tuple[int, float | None]] = (),
    title: str = "",
    quantity: str = LOSS,
) -> None:
    """Plot losses over steps, and the (step, loss) pairs of evaluations; or another quantity.

    The file is written atomically. Raises MissingExtra if matplotlib is not installed.
    """
    matplotlib = require("matplotlib", os.path.basename(path))
    with matplotlib.rc_context({"agg.path.chunksize": AGG_CHUNK_POINTS}):
        figure = loss_figure(steps, losses, eval_points, title, quantity)
        with atomic_writer(path, "wb") as file:
            figure.savefig(file, format="png")


def loss_figure(
    steps: Sequence[int],
    losses: Sequence[float | None],
    eval_points: Iterable[tuple[int, float | None]] = (),
    title: str = "",
    quantity: str = LOSS,
) -> "Figure":
    """The figure that `save_loss_png` writes. It uses no pyplot, hence no display and no state."""
    figure = require("matplotlib.figure", "loss.png").Figure(
        figsize=SIZE_INCHES, dpi=DPI, layout="constrained"
    )
    ticker = require("matplotlib.ticker", "loss.png")
    axes = figure.add_subplot()
    train = finite_points(steps, losses)
    pairs = list(eval_points)
    evals = finite_points([step for step, _ in pairs], [loss for _, loss in pairs])
    if len(train[0]):
        radius = len(train[1]) // 60
        smooth = moving_average(np.minimum(train[1], typical_max(train[1])), radius)
        last = f"each step (last {train[1][-1]:#.4g})"
        axes.plot(*train, color=RAW_COLOR, linewidth=0.8, label=last)
        last = f"moving average (last {smooth[-1]:#.4g})"
        axes.plot(train[0], smooth, color=SMOOTH_COLOR, linewidth=1.8, label=last)
    if len(evals[0]):
        last = f"evaluation (last {evals[1][-1]:#.4g})"
        axes.plot(*evals, color=EVAL_COLOR, linewidth=1.0, marker="o", markersize=4.5, label=last)
    curves = [losses for _, losses in (train, evals) if len(losses)]
    if curves:
        set_loss_axis(axes, curves, ticker, LOG_SCALE_FROM if quantity == LOSS else math.inf)
        axes.legend(
            loc="upper right" if quantity == LOSS else "lower right",
            framealpha=0.8,
            edgecolor="none",
        )
    else:
        axes.text(0.5, 0.5, "no finite losses", transform=axes.transAxes, ha="center")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0.01)
    axes.set_xlabel("step")
    axes.set_ylabel(quantity)
    axes.set_title(title if len(title) <= 80 else f"{title[:79]}…", loc="left", parse_math=False)
    axes.grid(which="major", color="#e9ecf0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def set_loss_axis(
    axes: "Axes", curves: Sequence[np.ndarray], ticker: ModuleType, log_scale_from: float
) -> None:
    """Limits without spikes; a logarithmic scale where losses span more than `log_scale_from`."""
    low = min(float(losses.min()) for losses in curves)
    high = max(typical_max(losses) for losses in curves)
    if low > 0 and high / low > log_scale_from:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        margin = (high / low) ** 0.05
        axes.set_ylim(low / margin, high * margin)
    else:
        padding = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
        axes.set_ylim(low - padding, high + padding)


def finite_points(steps: Sequence[int], losses: Sequence[float | None]) -> Points:
    """(steps, losses) sorted by step, without losses that are None, NaN or infinite."""
    x = np.asarray(steps, float)
    y = np.asarray([math.nan if loss is None else loss for loss in losses], float)
    finite = np.isfinite(y)
    order = np.argsort(x[finite], kind="stable")
    return x[finite][order], y[finite][order]


def typical_max(losses: np.ndarray) -> float:
    return float(np.percentile(losses, 99.5))


def moving_average(values: np.ndarray, radius: int) -> np.ndarray:
    """The mean over `radius` neighbours on each side.

    The window shrinks symmetrically at the start, where losses fall steeply. At the end it is
    one-sided, so that the last value is not that of a single noisy batch.
    """
    index = np.arange(len(values))
    left = np.minimum(radius, index)
    right = np.minimum(left, len(values) - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + right + 1] - sums[index - left]) / (left + right + 1)
