"""The command as a person meets it."""

import json
import subprocess
import sys

import pytest
import yaml

from maxtext.cli.main import COMMANDS, main

NUM_KEYS = 743  # 723 published ones, and those that tests/configs/test_spec.py lists


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from maxtext.cli.main import main; main(['--help']); main(['config', "
        "'--help']);"
        "heavy = {'jax', 'numpy', 'pydantic', 'yaml', 'rich', 'flax'} & set(sys.modules); "
        "sys.exit(len(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0
    assert "usage: maxtext COMMAND" in result.stdout


def test_config_needs_jax_for_devices_only():
    code = (
        "import sys; from maxtext.configs.load import load; from maxtext.configs.derive import "
        "Devices;"
        "load(None, ['model_name=llama3.1-8b'], devices=Devices(1)); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: maxtext {command}" in text
    assert f"example: maxtext {command}" in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("maxtext 0.")


def test_config_prints_groups_values_and_sources(capsys):
    assert main(["config", "model_name=llama3.1-8b", "base_output_directory=/out"]) == 0
    text = capsys.readouterr().out
    assert "# RunInfo: " in text
    line = next(line for line in text.splitlines() if line.startswith("base_emb_dim:"))
    assert line.split("#")[0].strip() == "base_emb_dim: 4096"
    assert "models/llama3.1-8b.yml:" in line
    is_key = [":" in line and not line.startswith(("#", " ")) for line in text.splitlines()]
    assert sum(is_key) == NUM_KEYS


def test_config_changed(capsys):
    assert main(["config", "base_emb_dim=64", "run_name=a", "--changed"]) == 0
    keys = [
        line.split(":")[0]
        for line in capsys.readouterr().out.splitlines()
        if line and line[0] not in "# "
    ]
    assert keys == ["run_name", "base_output_directory", "base_emb_dim"]


def test_config_as_json_and_yaml(capsys):
    assert main(["config", "base_emb_dim=64", "run_name=a", "--format", "json"]) == 0
    from_json = json.loads(capsys.readouterr().out)
    assert main(["config", "base_emb_dim=64", "run_name=a", "--format=yaml"]) == 0
    from_yaml = yaml.safe_load(capsys.readouterr().out)
    assert from_json == from_yaml
    assert len(from_json) == NUM_KEYS
    assert from_json["emb_dim"] == 64
    assert from_json["dtype"] == "bfloat16"


def test_explain(capsys):
    assert main(["config", "explain", "remat_policy", "remat_policy=minimal"]) == 0
    text = capsys.readouterr().out
    for part in (
        "RematAndOffload",
        "backward pass",
        "default  full",
        "value    minimal",
        "command line",
        "acts",
    ):
        assert part in text
    assert main(["config", "explain", "gcs_metrics"]) == 0
    assert "does not act here" in capsys.readouterr().out
    assert main(["config", "explain", "emb_dim"]) == 0
    assert "computed" in capsys.readouterr().out


def test_status_counts_every_key(capsys):
    assert main(["config", "status"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{NUM_KEYS} keys: ")
    assert sum(bool(line) and not line.startswith("#") for line in rest) == NUM_KEYS


def test_module_entry_points():
    for door in ("maxtext.train", "maxtext.decode", "maxtext.train_compile"):
        result = subprocess.run(
            [sys.executable, "-m", door, "stepz=1"], capture_output=True, text=True
        )
        assert (result.returncode, "stepz" in result.stderr) == (2, True)
    result = subprocess.run(
        [sys.executable, "-m", "maxtext", "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0


def test_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m maxtext config | head -1"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
            "17179869184 bytes more",
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 3 things", "ran out of memory: lower"),
    ],
)
def test_out_of_memory_is_reported(monkeypatch, capsys, message, said):
    import jax

    def fail(args):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr("maxtext.cli.config.run", fail)
    assert main(["config"]) == 1
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(["config", "--debug"])
