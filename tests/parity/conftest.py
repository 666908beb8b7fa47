"""What the tests against transformers share: its tiny models, each made once, and ours of the same
folders.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from maxtext import LLM

ORACLES = ("torch", "transformers")

if all(importlib.util.find_spec(name) for name in ORACLES):
    sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import the zoo
else:
    collect_ignore = [
        "test_zoo.py",
        "test_config_json.py",
        "test_other_folders.py",
        "test_training.py",
        "test_fine_tuning.py",
        "test_served.py",
        "test_variations.py",
    ]


@pytest.fixture(scope="session")
def specimen(tmp_path_factory):
    """(name of a case) -> its folder and transformers' logits."""
    import torch
    import transformers
    import zoo

    torch.set_num_threads(1)  # tests run in parallel, and these models are too small to share
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = {}

    def get(name):
        if name not in made:
            made[name] = zoo.make(zoo.CASES[name], tmp_path_factory.mktemp("zoo") / "model")
        return made[name]

    return get


@pytest.fixture(scope="session")
def model(specimen):
    """(name of a case) -> our model of its folder."""
    import zoo

    loaded = {}

    def get(name):
        if name not in loaded:
            loaded[name] = LLM.load(specimen(name).folder, **zoo.SETTINGS)
        return loaded[name]

    return get
