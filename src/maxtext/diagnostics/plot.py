"""loss.png: the loss over the steps, drawn without a plotting package, so that every run has a
picture of itself.

The loss of each step is pale, a moving average lies over it, evaluations are dots. The numbers at
the top are where the curves end: the loss of the last step, as in summary.json, and the average
("smoothed"). Losses that are not finite are left out; those beyond the 99.5th percentile, spikes
mostly, run out of the frame instead of flattening the rest, and count as the percentile in the
average.
"""

import math
import os
from collections.abc import Iterable, Sequence

import numpy as np

from maxtext.common.files import atomic_writer
from maxtext.diagnostics.canvas import Canvas, text_width

WIDTH, HEIGHT = 900, 500
LEFT, RIGHT, TOP, BOTTOM = 78, 876, 48, 442  # the frame of the curves
BACKGROUND, GRID, FRAME, INK = (255, 255, 255), (233, 236, 240), (150, 156, 165), (66, 72, 82)
RAW, SMOOTH, EVALUATION = (178, 205, 238), (30, 96, 180), (226, 106, 28)
RAW_TEXT = (120, 160, 210)  # darker than the line, to be read

Points = tuple[np.ndarray, np.ndarray]
Range = tuple[float, float]


def save_loss_png(
    path: str | os.PathLike,
    steps: Sequence[int],
    losses: Sequence[float | None],
    eval_points: Iterable[tuple[int, float | None]] | None = None,
    title: str = "loss",
) -> None:
    """Draw losses over steps, and (step, loss) pairs of evaluations; complete or absent."""
    training = finite_points(steps, losses)
    pairs = list(eval_points or ())
    evaluation = finite_points([step for step, _ in pairs], [loss for _, loss in pairs])
    canvas = Canvas(WIDTH, HEIGHT, BACKGROUND)
    x_range, y_range = ranges([curve for curve in (training, evaluation) if len(curve[0])])
    draw_axes(canvas, x_range, y_range)

    def placed(points: Points) -> Points:
        return place(points[0], x_range, LEFT, RIGHT), place(points[1], y_range, BOTTOM, TOP)

    frame = (TOP, BOTTOM)
    legend = []
    if len(training[0]):
        smooth = moving_average(
            np.minimum(training[1], usual_top(training[1])), len(training[1]) // 60
        )
        canvas.line(*placed(outline(training)), RAW, 0.4, frame)
        canvas.line(*placed(outline((training[0], smooth))), SMOOTH, 1.4, frame)
        canvas.dots(*placed((training[0][-1:], smooth[-1:])), SMOOTH, 3, frame)
        legend.append((f"last {training[1][-1]:#.4g}", RAW_TEXT))
        legend.append((f"smoothed {smooth[-1]:#.4g}", SMOOTH))
    if len(evaluation[0]):
        canvas.line(*placed(evaluation), EVALUATION, 0.4, frame)
        canvas.dots(*placed(evaluation), EVALUATION, 4, frame)
        legend.append((f"evaluation {evaluation[1][-1]:#.4g}", EVALUATION))
    end: float = RIGHT
    for words, color in reversed(legend or [("no finite losses", INK)]):
        canvas.text(end, 20, words, color, align=1.0)
        end -= text_width(words) + 28
    room = int((end - LEFT) // text_width("x"))
    canvas.text(LEFT, 20, title if len(title) <= room else title[: room - 2] + "..", INK)
    with atomic_writer(path, "wb") as stream:
        stream.write(canvas.png())


def draw_axes(canvas: Canvas, x_range: Range, y_range: Range) -> None:
    across = ticks(*x_range, 8, whole=True)
    for value, x in zip(across, place(np.array(across), x_range, LEFT, RIGHT), strict=True):
        canvas.box(x, TOP, x, BOTTOM, GRID)
        canvas.text(x, BOTTOM + 10, short(value), INK, align=0.5)
    up = ticks(*y_range, 7)
    for value, y in zip(up, place(np.array(up), y_range, BOTTOM, TOP), strict=True):
        canvas.box(LEFT, y, RIGHT, y, GRID)
        canvas.text(LEFT - 8, y - 6, short(value), INK, align=1.0)
    canvas.box(LEFT, BOTTOM, RIGHT, BOTTOM, FRAME)
    canvas.box(LEFT, TOP, LEFT, BOTTOM, FRAME)
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 34, "step", INK, align=0.5)


def finite_points(steps: Sequence[int], losses: Sequence[float | None]) -> Points:
    """Points in the order of their steps, without those that have no number."""
    x, y = (
        np.asarray(steps, float),
        np.asarray([math.nan if loss is None else loss for loss in losses], float),
    )
    keep = np.isfinite(y)
    order = np.argsort(x[keep], kind="stable")
    return x[keep][order], y[keep][order]


def ranges(curves: Sequence[Points]) -> tuple[Range, Range]:
    """What the axes span; a range of no width gets some."""
    if not curves:
        return (0.0, 1.0), (0.0, 1.0)
    steps = np.concatenate([curve[0] for curve in curves])
    low = min(float(curve[1].min()) for curve in curves)
    high = max(usual_top(curve[1]) for curve in curves)
    room = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
    x_room = 0.0 if steps.min() < steps.max() else 0.5
    return (steps.min() - x_room, steps.max() + x_room), (low - room, high + room)


def usual_top(losses: np.ndarray) -> float:
    return float(np.percentile(losses, 99.5))


def place(values: np.ndarray, span: Range, start: float, end: float) -> np.ndarray:
    """Data to pixels: the span's ends go to `start` and `end`."""
    return start + (values - span[0]) / (span[1] - span[0]) * (end - start)


def moving_average(values: np.ndarray, reach: int) -> np.ndarray:
    """The mean of `reach` neighbours on each side.

    At the start, where losses fall steeply, fewer but as many on both sides; at the end only those
    on the left, since the last number should not be that of one noisy batch.
    """
    index = np.arange(len(values))
    left = np.minimum(reach, index)
    right = np.minimum(left, len(values) - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + right + 1] - sums[index - left]) / (left + right + 1)


def outline(points: Points, buckets: int = RIGHT - LEFT) -> Points:
    """A long curve by the lowest and highest value of each pixel column, which looks the same and
    draws fast.
    """
    x, y = points
    if len(x) <= 2 * buckets:
        return points
    starts = np.linspace(0, len(x), buckets, endpoint=False).astype(int)
    extremes = np.stack([np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)], 1)
    return np.repeat(x[starts], 2), extremes.reshape(-1)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """At most about `count` round numbers (1, 2 or 5 times a power of ten) in the range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    size = max(size, 1.0) if whole else size
    return [
        number * size
        for number in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    ]


def short(value: float) -> str:
    """Four digits, and thousands as 20k."""
    return f"{value / 1e3:.4g}k" if abs(value) >= 1e4 else f"{value:.4g}"
