"""The picture is a PNG that decodes, and its curve lies where the losses are."""

import struct
import zlib

import numpy as np
import pytest

from maxtext.diagnostics import plot
from maxtext.diagnostics.plot import (
    BOTTOM,
    EVALUATION,
    LEFT,
    RIGHT,
    SMOOTH,
    TOP,
    moving_average,
    save_loss_png,
    ticks,
)


def decode(path) -> np.ndarray:
    """A reader of unfiltered 8-bit RGB PNGs that checks what it reads."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, color, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, color) == (8, 2)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def heights(image, color, columns) -> list[float]:
    """The mean row of a colour in the frame, in each column."""
    frame = image[TOP : BOTTOM + 1]
    return [
        float(np.flatnonzero((frame[:, column] == color).all(1)).mean()) + TOP for column in columns
    ]


def test_the_size_and_a_line_where_the_losses_are(tmp_path):
    path = tmp_path / "loss.png"
    save_loss_png(path, range(101), [5.0 - 0.04 * step for step in range(101)])
    image = decode(path)
    assert image.shape == (500, 900, 3)
    # A straight line from 5 to 1, with the axis 5% longer on both sides (its top at the 99.5th
    # percentile, 4.98).
    low, high = 1.0 - 0.05 * 3.98, 4.98 + 0.05 * 3.98
    columns = [LEFT + 100, (LEFT + RIGHT) // 2, RIGHT - 100]
    for column, row in zip(columns, heights(image, SMOOTH, columns), strict=True):
        loss = 5.0 - 4.0 * (column - LEFT) / (RIGHT - LEFT)
        assert row == pytest.approx(BOTTOM - (loss - low) / (high - low) * (BOTTOM - TOP), abs=1.5)
    assert list(tmp_path.iterdir()) == [path]


def test_evaluations_are_dots_at_their_steps(tmp_path):
    path = tmp_path / "loss.png"
    save_loss_png(path, [0, 100], [2.0, 1.0], eval_points=[(25, 1.9), (75, 1.4)])
    image = decode(path)
    frame = (image[TOP : BOTTOM + 1] == EVALUATION).all(2)
    columns = np.flatnonzero(frame.sum(0) >= 6)  # the dots; the line between them is thinner
    middle = (LEFT + RIGHT) / 2
    for step, part in ((25, columns[columns < middle]), (75, columns[columns > middle])):
        assert part.mean() == pytest.approx(LEFT + step / 100 * (RIGHT - LEFT), abs=1.5)


def test_spikes_and_numbers_that_are_not_finite_do_not_flatten_the_curve(tmp_path):
    losses = [4.0 - 3.0 * step / 999 for step in range(1000)]
    losses[500], losses[200], losses[300], losses[400] = 1e6, float("nan"), float("inf"), None
    path = tmp_path / "loss.png"
    save_loss_png(path, range(1000), losses)
    rows = heights(decode(path), SMOOTH, [LEFT + 20, RIGHT - 20])
    assert rows[1] - rows[0] > 0.8 * (BOTTOM - TOP)


@pytest.mark.parametrize("losses", [[], [1.0], [2.0, 2.0], [float("nan")], [0.0], [-1e-9, 1e9]])
def test_odd_data_still_gives_a_picture(tmp_path, losses):
    path = tmp_path / "loss.png"
    save_loss_png(path, range(len(losses)), losses, title="ünusual TITLE " * 20)
    assert decode(path).std() > 0


def test_a_long_run_is_drawn_quickly_and_whole(tmp_path):
    path = tmp_path / "loss.png"
    noise = np.random.default_rng(0).normal(0, 0.1, 150_000)
    save_loss_png(path, range(150_000), 3.0 + noise)
    heights(
        decode(path), plot.RAW, range(LEFT + 2, RIGHT - 2, 20)
    )  # fails on a column without the curve


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(plot.Canvas, "png", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_loss_png(path, [0], [1.0])
    assert path.read_bytes() == b"old"


def test_the_moving_average():
    got = moving_average(np.array([9.0, 0.0, 3.0, 6.0, 0.0, 3.0]), 2)
    # itself; three around; five around; five; four (two left, one right); three (two left)
    assert got == pytest.approx([9.0, 4.0, 18 / 5, 12 / 5, 12 / 4, 9 / 3])


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [(0, 100, True, [0, 20, 40, 60, 80, 100]), (0.97, 5.2, False, [1, 2, 3, 4, 5]), (0, 3, True, [0, 1, 2, 3]),
     (149_000, 151_000, True, [149_000, 149_500, 150_000, 150_500, 151_000])],
)  # fmt: skip
def test_ticks(low, high, whole, expected):
    assert ticks(low, high, 7, whole) == pytest.approx(expected)


def test_the_legend_shows_the_last_loss_and_the_smoothed_one(tmp_path, monkeypatch):
    """The last loss is the one in summary.json; of 180 steps the average is over the last four."""
    words = []
    text = plot.Canvas.text
    monkeypatch.setattr(
        plot.Canvas,
        "text",
        lambda self, *args, **keys: words.append(args[2]) or text(self, *args, **keys),
    )
    losses = [3.0] * 176 + [1.6, 1.6, 1.6, 1.4]
    save_loss_png(tmp_path / "loss.png", range(180), losses, [(179, 1.7)])
    assert {"last 1.400", "smoothed 1.550", "evaluation 1.700"} <= set(words)
