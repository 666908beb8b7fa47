"""Configurations and a log to look at, for the tests of this room."""

import logging

import pytest

from maxtext.common.log import LOGGER
from maxtext.configs.load import base_values


@pytest.fixture
def make_config(tmp_path):
    """base.yml with some keys changed, and the run's folders under tmp_path."""

    def make(**changes):
        folders = {
            "tensorboard_dir": str(tmp_path / "tensorboard"),
            "metrics_dir": str(tmp_path / "metrics"),
        }
        return base_values().model_copy(update={"steps": 100, **folders, **changes})

    return make


@pytest.fixture
def log():
    """The lines that the package logs during the test."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Keep(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield lines
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)
