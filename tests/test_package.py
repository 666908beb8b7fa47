"""What is installed, and that every extra can be."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ["cuda13", "cuda12", "tpu", "hf", "tfds", "tensorboard", "wandb", "serve", "test", "docs"]


def test_base_install_is_small():
    names = {requirement.split(">")[0].split("[")[0] for requirement in PROJECT["dependencies"]}
    assert not names & {"torch", "tensorflow", "google-cloud-storage", "transformers", "datasets", "matplotlib"}
    assert list(PROJECT["optional-dependencies"]) == EXTRAS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "python"), [(extra, "3.12") for extra in EXTRAS] + [(None, "3.11"), (None, "3.13"), ("hf", "3.13")]
)
def test_extra_resolves(extra, python):
    """Asks the package index; nothing is installed."""
    uv = Path(sys.executable).parent / "uv"
    command = [
        uv, "pip", "compile", "pyproject.toml", "--quiet", "--python-version", python,
        "--python-platform", "x86_64-manylinux_2_40",
    ]  # fmt: skip
    result = subprocess.run(command + (["--extra", extra] if extra else []), cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "jax==0.1" in result.stdout
    if extra in ("cuda12", "cuda13"):
        assert f"jax-{extra}-plugin" in result.stdout
