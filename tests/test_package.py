"""The dependencies: a small base install, and extras that resolve."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [
    "cuda13",
    "cuda12",
    "tpu",
    "hf",
    "text",
    "tfds",
    "parquet",
    "tensorboard",
    "wandb",
    "plot",
    "prometheus",
    "serve",
    "math",
    "eval",
    "test",
]


def test_base_install_is_small():
    names = {requirement.split(">")[0].split("[")[0] for requirement in PROJECT["dependencies"]}
    assert not names & {
        "torch",
        "tensorflow",
        "google-cloud-storage",
        "transformers",
        "datasets",
        "matplotlib",
        "prometheus-client",
    }
    assert list(PROJECT["optional-dependencies"]) == EXTRAS


@pytest.mark.representative("none on 3.11")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "python"),
    [
        pytest.param(
            [extra for extra in EXTRAS if extra != "cuda12"], "3.12", id="all but cuda12 on 3.12"
        ),
        pytest.param(["cuda12"], "3.12", id="cuda12 on 3.12"),
        pytest.param([], "3.11", id="none on 3.11"),
        pytest.param(["hf"], "3.13", id="hf on 3.13"),
    ],
)
def test_extras_resolve(extras, python):
    """Extras resolve together, hence each alone. Queries the package index, installs nothing."""
    uv = Path(sys.executable).parent / "uv"
    command = [
        uv,
        "pip",
        "compile",
        "pyproject.toml",
        "--quiet",
        "--python-version",
        python,
        "--python-platform",
        "x86_64-manylinux_2_40",
        *(f"--extra={extra}" for extra in extras),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "jax==0.1" in result.stdout
    for extra in {"cuda12", "cuda13"}.intersection(extras):
        assert f"jax-{extra}-plugin" in result.stdout


@pytest.mark.slow
def test_training_imports_no_data_library_before_it_needs_one():
    """Grain takes a second to import, and runs on synthetic data do not need it."""
    program = (
        "import sys, maxtext.trainers.train;"
        "print(sorted(sys.modules.keys() & {'grain', 'datasets', 'tensorflow', 'torch', "
        "'transformers', 'jinja2'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_names_of_the_package_load_on_first_use():
    program = (
        "import sys, maxtext;"
        "print('jax' in sys.modules);"
        "print(maxtext.losses.dpo.__module__);"
        "from maxtext import losses;"
        "print(losses is maxtext.losses is sys.modules['maxtext.losses'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "maxtext.trainers.losses.preference", "True"]
