"""`maxtext train` before a model is set up."""

import pytest

from maxtext.cli.main import main


@pytest.mark.parametrize("args", [[], ["steps=3"], ["model_name=qwen3-0.6b"]], ids=str)
def test_no_data_is_one_sentence_before_the_set_up(args, capsys, monkeypatch):
    monkeypatch.setattr(
        "maxtext.common.processes.preallocate_gpu_memory", lambda: pytest.fail("the set-up began")
    )
    assert main(["train", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no data to train on" in line
    assert "maxtext train quickstart" in line
    assert "dataset_type=synthetic" in line


def test_a_named_dataset_is_looked_for(capsys, monkeypatch):
    class SetUp(Exception):
        pass

    def stop():
        raise SetUp

    monkeypatch.setattr("maxtext.common.processes.preallocate_gpu_memory", stop)
    for setting in ("dataset_type=synthetic", "dataset_name=c4/en:3.0.1", "dataset_path=/data"):
        with pytest.raises(SetUp):
            main(["train", setting])
