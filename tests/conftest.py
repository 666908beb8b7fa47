"""For all rooms."""

import gc
import importlib
import logging
import signal
import time
from pathlib import Path

import jax
import pytest
from jax._src.core import trace_state_clean

from tests.compiling import FAST_COMPILE

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000  # of the 65,530 that Linux lets a process have


LONGEST = (
    "test_layouts_",
    "test_resume",
    "test_launch",
    "test_zoo",
    "test_no_silent_keys",
    "test_scheduler",
)


COMPILING = (
    "inference",
    "kernels",
    "layers",
    "models",
    "optimizers",
    "parity",
    "sharding",
    "trainers",
)  # rooms


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Files that take minutes come first: else one worker ends long after the other. Where each
    case of a test compiles programs of its own, only the first is quick."""
    items.sort(key=lambda item: not item.path.name.startswith(LONGEST))
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen and item.path.parent.name in COMPILING:
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def default_signals():
    """A suite that runs under nohup ignores SIGHUP, and so would every process that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def rare_collections():
    """Tracing makes many small objects that live long; looking through all of them again and again
    takes time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def restored_logger():
    """A test that configures the package's logger leaves it as it was: pytest captures a logger
    that does not propagate by itself, and one that does through the root."""
    logger = logging.getLogger("maxtext")
    before = logger.propagate, logger.level
    yield
    logger.propagate, level = before
    logger.setLevel(level)


@pytest.fixture
def log_messages():
    """The messages of the package's logger, as they come."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("maxtext")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


looked = 0.0


@pytest.fixture(autouse=True)
def forgotten_programs():
    """A compiled program has several mappings of memory; a process that runs out of them dies while
    it compiles.
    """
    yield
    global looked
    if time.monotonic() - looked > 5 and MAPPINGS.exists():
        if MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()
        looked = time.monotonic()


@pytest.fixture(scope="module")
def quick_programs():
    """Compiling is most of the time here, and most of that goes into making programs of a moment
    faster.
    """
    importlib.import_module(
        "maxtext.kernels.grouped_matmul_hopper"
    )  # else it would be imported, and wrapped, in between

    def quick(*arguments, jit=jax.jit, **options):  # not for a part of a program
        return jit(
            *arguments,
            **options | ({"compiler_options": FAST_COMPILE} if trace_state_clean() else {}),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick)
        yield
