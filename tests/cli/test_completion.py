"""Completion of words in real shells, as far as they are installed."""

import os
import shutil
import subprocess
import sys

import pytest

from maxtext.cli.commands import COMMANDS
from maxtext.cli.completion import SHELLS, candidates, keys
from maxtext.cli.main import main
from maxtext.configs import fields, sources

# In each shell: a program that completes LINE and prints the words
BASH = """
source "$SCRIPT"
COMP_LINE="$LINE" COMP_POINT=${#LINE}
compopt() { :; }
_maxtext
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
source $SCRIPT
complete -C "$LINE" | string split -f 1 \\t
true
"""
ZSH = """
compdef() { :; }
compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- "$@"; }
_files() { print -l -- *(N); }
source $SCRIPT
words=(${(z)LINE}); [[ $LINE == *' ' ]] && words+=('')
CURRENT=$#words
_maxtext
"""
DRIVERS = {"bash": BASH, "fish": FISH, "zsh": ZSH}


def test_words(capsys):
    assert main(["completion", "candidates", "ser"]) == 0
    assert capsys.readouterr().out == "serve\n"
    assert set(candidates([""])) == set(COMMANDS)
    assert candidates(["data", "insp"]) == ["inspect"]
    assert set(candidates(["convert", ""])) == {
        "from_hf", "to_hf", "params-only", "merge-adapter"
    }  # fmt: skip
    assert "--served-model-name" in candidates(["serve", "m", "--"])
    assert candidates(["data", "prepare", "--"]) == [
        "--debug", "--help", "--out", "--shard-documents", "--workers"
    ]  # fmt: skip
    assert candidates(["serve", "m", "--reasoning-parser", "t"]) == ["think"]
    assert candidates(["train", "quicks"]) == ["quickstart"]
    assert candidates(["train", "qwen3-0"]) == ["qwen3-0.6b"]
    assert candidates(["sft", "m", "learning_ra"])[0] == "learning_rate="
    assert candidates(["sft", "packing="]) == ["packing=true", "packing=false"]
    assert candidates(["sft", "dtype=b"]) == ["dtype=bfloat16"]
    assert candidates(["nothing", "a"]) == []


def test_names_are_those_of_the_configuration():
    assert set(keys()) <= set(fields.KEYS) | {"base_config"}
    assert len(keys()) > 700
    assert set(candidates(["train", ""])) >= set(sources.presets())


@pytest.mark.parametrize("shell", DRIVERS)
def test_shells(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell])
    program = tmp_path / "bin" / "maxtext"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m maxtext "$@"\n')
    program.chmod(0o755)
    (tmp_path / "chats.jsonl").touch()
    path = f"{program.parent}:{os.environ['PATH']}"

    def complete(line):
        result = subprocess.run(
            [shell, "-c", DRIVERS[shell]],
            env={**os.environ, "SCRIPT": str(script), "LINE": line, "PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout.split()

    assert complete("maxtext ser") == ["serve"]
    assert "chats.jsonl" in complete("maxtext sft ")
    assert complete("maxtext serve m --metrics") == ["--metrics-prefix"]
    assert "learning_rate=" in complete("maxtext sft learning_r")
    expected = ["int8"] if shell == "bash" else ["kv_quant_dtype=int8"]
    assert set(complete("maxtext serve kv_quant_dtype=int8")) <= set(expected)
    expected = ["false"] if shell == "bash" else ["packing=false"]
    assert complete("maxtext sft packing=f") == expected


def test_unknown_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "name a task: maxtext completion bash|zsh|fish" in capsys.readouterr().err
