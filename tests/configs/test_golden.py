"""The whole resolved configuration of six models as text, so that a changed default shows in a
diff.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/configs/test_golden.py, and read the
diff.
"""

import os
from pathlib import Path

import pytest

from maxtext.configs import serialize
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values
from maxtext.models.configuration import load

GOLDEN = Path(__file__).parent / "golden"
MODELS = ["llama3.1-8b", "gemma3-12b", "deepseek3-671b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt3-52k"]


@pytest.fixture
def home(monkeypatch):
    """A home that is the same on every machine, and in no value that is kept for later tests."""
    base_values.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("HOME", "/home/user")
        yield
    base_values.cache_clear()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("home")
def test_resolved(name):
    config = load(None, [f"model_name={name}", "run_name=golden"], environ={}, devices=Devices(1))
    lines = [
        f"{serialize.yaml_line(key, getattr(config, key))}  # {config.source(key).kind}"
        for key in serialize.KEYS_IN_ORDER
    ]
    got = "\n".join(lines) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(got)
    assert got == path.read_text()


def test_golden_files_are_the_tested_ones():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(MODELS)
