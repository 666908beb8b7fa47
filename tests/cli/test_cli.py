"""The command as a person meets it."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from maxtext import cli
from maxtext.cli.arguments import command_help
from maxtext.cli.eval import MODES
from maxtext.cli.main import COMMANDS, main
from maxtext.common import log
from maxtext.configs import fields
from tests.support.added_keys import ADDED_KEYS

NUM_KEYS = 723 + sum(map(len, ADDED_KEYS.values()))  # published ones and our own


def imported_by(code: str, modules: set[str]) -> set[str]:
    """Which of the modules are imported after this code has run in a process of its own."""
    program = f"{code}\nimport sys; print(*(sys.modules.keys() & {modules!r}), sep=chr(10))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return modules.intersection(result.stdout.splitlines())


@pytest.mark.parametrize("args", [["--help"], ["config", "--help"], ["doctor", "--help"], []])
def test_help_imports_nothing_heavy(args):
    heavy = {"jax", "flax", "numpy", "pydantic", "yaml", "rich"}
    assert not imported_by(f"from maxtext.cli.main import main; main({args})", heavy)


def test_importing_the_package_imports_nothing_heavy():
    assert not imported_by("import maxtext", {"jax", "flax", "numpy", "pydantic", "yaml"})


def test_config_status_imports_no_jax():
    code = "from maxtext.cli.main import main; main(['config', 'status'])"
    assert not imported_by(code, {"jax", "flax"})


def test_configurations_are_resolved_and_checked_without_jax():
    """JAX only counts the devices, if they are not given."""
    code = """
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
for model in ("llama3.1-8b", "deepseek3-671b", "qwen3-next-80b-a3b", "gemma4-26b"):
    load(None, [f"model_name={model}", "override_model_config=true"], devices=Devices(1))
"""
    assert not imported_by(code, {"jax", "flax", "optax"})


@pytest.mark.parametrize(
    "args", [["config", "model_name=qwen3-8b"], ["config", "explain", "dtype"]]
)
@pytest.mark.slow
def test_config_imports_no_layers(args):
    code = f"from maxtext.cli.main import main; main({args})"
    assert not imported_by(code, {"flax", "optax", "orbax", "maxtext.layers.linear"})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: maxtext {command}" in text
    assert f"example: maxtext {command}" in text


OPTIONS = [
    (command, option)
    for command, record in COMMANDS.items()
    for form in record.forms.values()
    for option in form.options
]


def test_every_option_acts():
    """It stands for a key, or the source of the command line reads it."""
    source = "".join(path.read_text() for path in Path(cli.__file__).parent.glob("*.py"))
    unread = [
        f"{command} {option.name}"
        for command, option in OPTIONS
        if option.help and not option.overrides and f'["{option.name}"]' not in source
        and not (command == "eval" and option.name in MODES)
    ]  # fmt: skip
    assert not unread


def test_options_refer_to_others_of_their_command():
    for command, option in OPTIONS:
        names = {row.name for name, row in OPTIONS if name == command}
        assert {*option.needs, *option.excludes} <= names, (command, option.name)
        if isinstance(option.overrides, str) and option.overrides:
            assert option.overrides.partition("=")[0] in fields.KEYS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(command):
    lines = command_help(command, COMMANDS[command]).splitlines()
    assert not [line for line in lines if len(line) > 100]


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
    assert keys == ["run_name", "base_output_directory", "base_emb_dim", "use_truncation"]


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
    assert main(["config", "explain", "train_micro_batch_size"]) == 0
    text = capsys.readouterr().out
    assert "bounds   at least 1, or -1" in text
    assert "needs    use_grpo=true" in text
    assert main(["config", "explain", "num_experts_per_tok"]) == 0
    assert "needs    num_experts above 1 in " in capsys.readouterr().out
    assert main(["config", "explain", "gcs_metrics"]) == 0
    assert "does not act here" in capsys.readouterr().out
    assert main(["config", "explain", "emb_dim"]) == 0
    assert "computed" in capsys.readouterr().out


def test_status_counts_every_key(capsys):
    assert main(["config", "status"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{NUM_KEYS} keys: ")
    assert sum(bool(line) and not line.startswith("#") for line in rest) == NUM_KEYS


def test_warnings_before_the_log_is_set_up_have_its_format(capsys, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "handlers", [])
    assert main(["config", "attention=cudnn_flash_te"]) == 0
    warning = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING attention=cudnn_flash_te is .*\n", warning)
    assert not log.LOGGER.handlers


@pytest.mark.parametrize("module", ["train", "decode", "train_compile", "standalone_dataloader"])
def test_module_entry_points(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "stepz=1"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"maxtext.{module}", run_name="__main__")
    assert exit_.value.code == 2
    assert "stepz" in capsys.readouterr().err


def test_python_m_maxtext():
    result = subprocess.run(
        [sys.executable, "-m", "maxtext", "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0


@pytest.mark.slow
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


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_opened_on_the_null_device(closed, tmp_path):
    """Else the log cannot be configured, and the next connection would become standard error."""
    script = (
        "import os, sys; from maxtext.cli import entry; entry.open_closed_streams();"
        "print('lost', file=sys.stderr, flush=True);"
        f"file = open({str(tmp_path / 'file')!r}, 'w');"
        "file.write(f'{file.fileno()} {sys.stdin.read()}{sys.stdout.write(str())}')"
    )
    command = ["bash", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", script]
    result = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True)
    assert result.stdout == ""
    descriptor, written = (tmp_path / "file").read_text().split()
    assert int(descriptor) > 2
    assert written == "0"
    command[-1] = "import sys; from maxtext.cli.entry import entry; entry('nonsense')"
    result = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
