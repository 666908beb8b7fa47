"""loss.png: the curves have the losses of the run, and the file is a complete PNG."""

import sys

import matplotlib.image
import numpy as np
import pytest

from maxtext.common.errors import MissingExtra
from maxtext.diagnostics.plot import loss_figure, moving_average, save_loss_png


def curves(figure) -> dict[str, np.ndarray]:
    """The plotted (step, loss) points by the first word of their label."""
    return {line.get_label().split()[0]: line.get_xydata() for line in figure.axes[0].lines}


def test_curves_have_the_losses_at_their_steps():
    losses = [5.0 - 0.04 * step for step in range(101)]
    figure = loss_figure(range(101), losses, [(75, 1.4), (25, 1.9)], title="my_run $1")
    axes = figure.axes[0]
    lines = curves(figure)
    np.testing.assert_allclose(lines["each"], np.stack([np.arange(101), losses], 1))
    np.testing.assert_allclose(
        lines["moving"][2:-1, 1], losses[2:-1]
    )  # the mean of a straight line
    np.testing.assert_allclose(lines["evaluation"], [[25, 1.9], [75, 1.4]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    assert axes.get_title(loc="left") == "my_run $1"
    # 5% longer than the losses on both sides; the top is their 99.5th percentile, 4.98.
    assert axes.get_ylim() == pytest.approx((1.0 - 0.05 * 3.98, 4.98 + 0.05 * 3.98))


def test_spikes_and_nonfinite_losses_do_not_flatten_the_curve():
    losses = [4.0 - 3.0 * step / 999 for step in range(1000)]
    losses[500], losses[200], losses[300], losses[400] = 1e6, float("nan"), float("inf"), None
    figure = loss_figure(range(1000), losses)
    low, high = figure.axes[0].get_ylim()
    assert 0.5 < low < 1.0
    assert 3.9 < high < 4.5
    assert len(curves(figure)["each"]) == 997
    assert curves(figure)["moving"][:, 1].max() < 4.5


@pytest.mark.parametrize(
    ("losses", "scale"),
    [([5.0, 2.0], "linear"), ([5.0, 0.01], "log"), ([5.0, 0.0], "linear"), ([5.0, -1.0], "linear")],
)
def test_uses_a_log_scale_for_losses_that_span_decades(losses, scale):
    assert loss_figure([0, 1], losses).axes[0].get_yscale() == scale


def test_legend_shows_the_last_values():
    """The last loss is the one in summary.json; of 180 steps the average is over the last four."""
    losses = [3.0] * 176 + [1.6, 1.6, 1.6, 1.4]
    legend = loss_figure(range(180), losses, [(179, 1.7)]).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "each step (last 1.400)",
        "moving average (last 1.550)",
        "evaluation (last 1.700)",
    ]


def test_writes_a_png_and_nothing_else(tmp_path):
    path = tmp_path / "loss.png"
    save_loss_png(path, range(10), np.linspace(5, 1, 10))
    assert list(tmp_path.iterdir()) == [path]
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (750, 1350)
    assert image.std() > 0


@pytest.mark.parametrize("losses", [[], [1.0], [2.0, 2.0], [float("nan")], [0.0], [-1e-9, 1e9]])
def test_degenerate_losses_give_a_picture(tmp_path, losses):
    path = tmp_path / "loss.png"
    save_loss_png(path, range(len(losses)), losses, title="ünusual TITLE " * 20)
    assert matplotlib.image.imread(path).std() > 0


@pytest.mark.slow
def test_plots_a_long_noisy_run(tmp_path):
    """Agg raises "exceeded cell block limit" on such a path unless it may split it."""
    path = tmp_path / "loss.png"
    noise = np.random.default_rng(0).normal(0, 0.1, 150_000)
    save_loss_png(path, range(150_000), 3.0 + noise)
    assert matplotlib.image.imread(path).std() > 0


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="No space"):
        save_loss_png(path, [0], [1.0])
    assert path.read_bytes() == b"old"


def test_names_the_extra_if_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r'loss.png needs .*pip install -e .*\[plot\]"'):
        save_loss_png(tmp_path / "loss.png", [0], [1.0])
    assert list(tmp_path.iterdir()) == []


def test_moving_average():
    smooth = moving_average(np.array([9.0, 0.0, 3.0, 6.0, 0.0, 3.0]), 2)
    # itself; three around; five around; five; four (two left, one right); three (two left)
    assert smooth == pytest.approx([9.0, 4.0, 18 / 5, 12 / 5, 12 / 4, 9 / 3])
