"""For all rooms."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def rare_collections():
    """Tracing makes many small objects that live long; looking through all of them again and again takes time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
