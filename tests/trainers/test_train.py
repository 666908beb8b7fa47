"""The Plan and the files of a run."""

import sys
from pathlib import Path

import pytest

from maxtext.common.log import LOGGER
from maxtext.trainers.banner import describe_data
from maxtext.trainers.build import build_run_context


def test_the_plan_shows_the_share_that_truncation_drops(configure, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 159)  # 160 targets, in rows of 16
    data = [
        "dataset_type=grain", "grain_file_type=text", f"grain_train_files={tmp_path}",
        "tokenizer_path=byte", "vocab_size=259",
    ]  # fmt: skip
    assert describe_data(build_run_context(configure(*data))) == "grain"
    truncated = build_run_context(configure(*data, "use_truncation=true"))
    assert describe_data(truncated) == "grain; use_truncation=true drops 90.0% of the tokens"


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
