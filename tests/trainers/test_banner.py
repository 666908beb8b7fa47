"""The banner of a run."""

import pytest

import maxtext
from maxtext.trainers.banner import model_label


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "default"),
        ({"load_parameters_path": "models/Qwen3-0.6B"}, "models/Qwen3-0.6B"),
        ({"load_parameters_path": "a", "model_name": "qwen3-0.6b"}, "qwen3-0.6b"),
    ],
)
def test_the_model_is_named_by_its_folder_or_its_name(settings, label):
    assert model_label(maxtext.config(**settings)) == label
