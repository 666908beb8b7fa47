"""The memory that a run needs, the warning if a device has less, and the files of a run."""

import sys
from pathlib import Path

import pytest

from maxtext.common.log import LOGGER
from maxtext.models.counts import parameter_count
from maxtext.trainers.banner import describe_data
from maxtext.trainers.memory import usage
from maxtext.trainers.run_context import RunContext

GIB = 2**30


@pytest.mark.parametrize(("limit", "warned"), [(23 * GIB, True), (40 * GIB, False), (None, False)])
def test_warns_if_a_step_does_not_fit(monkeypatch, log_messages, limit, warned):
    monkeypatch.setattr(usage, "local_memory", lambda device, count: limit)
    assert usage.warn_if_too_large(39 * GIB, "a step") == bool(log_messages) == warned
    if warned:
        assert "a step needs about 39.00 GiB on each device, which has 23.00 GiB" in log_messages[0]
        assert "lower per_device_batch_size" in log_messages[0]


def test_state_bytes(configure):
    """Three float32 arrays for each weight (the weight and two moments), and a few counters."""
    context = RunContext.from_config(configure())
    weights = parameter_count(context.template.weights)
    assert 12 * weights <= usage.state_bytes(context) <= 12 * weights + 100


def test_the_plan_shows_the_share_that_truncation_drops(configure, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 159)  # 160 targets, in rows of 16
    data = [
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={tmp_path}",
        "tokenizer_path=byte", "vocab_size=259",
    ]  # fmt: skip
    assert describe_data(configure(*data)) == "grain"
    truncated = describe_data(configure(*data, "use_truncation=true"))
    assert truncated == "grain; use_truncation=true drops 90.0% of the tokens"


@pytest.mark.slow
def test_training_without_matplotlib_only_lacks_the_plot(run_training, monkeypatch, log_messages):
    LOGGER.setLevel("INFO")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = run_training("dataset_type=synthetic", "steps=1", plot=True)
    assert run.error is None
    folder = Path(run.config.base_output_directory) / "it"
    assert (folder / "summary.json").exists()
    assert not (folder / "loss.png").exists()
    (message,) = [message for message in log_messages if "loss.png" in message]
    assert '[plot]"' in message
