"""Small configurations and text files; tokens of the byte tokenizer are computed here by its
definition.
"""

import pytest

from maxtext.configs.load import base_values
from maxtext.configs.types import DatasetType
from maxtext.input_pipeline import packing


@pytest.fixture
def make_config():
    def make(**update):
        settings = {
            "dataset_type": DatasetType.GRAIN,
            "grain_file_type": "text",
            "tokenizer_path": "byte",
            "vocab_size": 259,
            "max_target_length": 8,
            "global_batch_size_to_load": 1,
            "global_batch_size_to_load_eval": 1,
            "enable_data_shuffling": False,
            "grain_num_threads": 2,
            "grain_num_threads_eval": 2,
        }
        return base_values().model_copy(update=settings | update)

    return make


@pytest.fixture
def write(tmp_path):
    """Writes documents as files in order, and returns their directory."""

    def write_documents(*documents: str | bytes, name: str = "corpus") -> str:
        folder = tmp_path / name
        folder.mkdir()
        for number, document in enumerate(documents):
            data = document.encode() if isinstance(document, str) else document
            (folder / f"{number:03}.txt").write_bytes(data)
        return str(folder)

    return write_documents


@pytest.fixture
def few_open_rows(monkeypatch):
    """So that a few documents make several groups of rows, and positions fall inside and between
    them.
    """
    monkeypatch.setattr(packing, "OPEN_ROWS", 5)
