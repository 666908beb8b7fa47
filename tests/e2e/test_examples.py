"""The scripts in examples/ run from end to end, with a few steps and rows."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from maxtext.cli.main import main
from maxtext.trainers import banner

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--steps", "2", "--base-steps", "2", "--rows", "64", "--heldout", "2")
PLOTS = dict.fromkeys(("sft", "lora", "qlora"), "fine_tuning.png") | {
    "dpo": "preferences.png",
    "grpo": "reinforcement.png",
    "tools": "tools.png",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All examples share a folder, and in it the base model."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def run_example(folder, monkeypatch):
    """(a name) -> run the script in this process, with its `maxtext` commands, so that JAX is
    imported once."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(banner, "save_loss_png", lambda *_, **__: None)
    modules = [importlib.import_module(name) for name in ("sorting", "report", "dpo")]

    def run_command(command, keys):
        settings = (f"{key}={value}" for key, value in keys.items())
        assert main([command, *settings, "jax_cache_dir="]) == 0

    monkeypatch.setattr(modules[0], "run_command", run_command)

    def run(name):
        script = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, "--folder", str(folder), *SMALL])
        runpy.run_path(script, run_name="__main__")

    yield run
    for module in modules:
        del sys.modules[module.__name__]


@pytest.mark.slow
@pytest.mark.representative("sft")
@pytest.mark.parametrize("name", PLOTS)
def test_example_runs(name, run_example, folder, capsys):
    run_example(name)
    result = json.loads((folder / name / "result.json").read_text())
    if name == "dpo":
        assert len(result["after"]["margins"]) == 2
    elif name in ("grpo", "tools"):
        num_runs = {"grpo": 6, "tools": 3}[name]
        assert [len(run["rewards"]) for run in result["runs"]] == [2] * num_runs
    else:
        assert 0 <= result["after"] <= 1
        assert len(result["losses"]) == 2
    assert "before   after" in capsys.readouterr().out
    assert (folder / PLOTS[name]).read_bytes().startswith(b"\x89PNG")
