"""Fixtures for all tests."""

import gc
import logging
import signal
import time
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.compiling import compile_fast, reuse_mlir_contexts

pytest.register_assert_rewrite("tests.support")
compile_fast()
reuse_mlir_contexts()
# jax_cache_dir has a default, the home folder; tests use a cache only where they name one.
jax.config.update("jax_enable_compilation_cache", False)

TESTS = Path(__file__).parent
MAPPINGS = Path("/proc/self/maps")
MAX_MAPPINGS = 20_000  # Linux allows a process 65,530
# beginnings of the names of files that take minutes
SLOWEST_FILES = (
    "test_layouts_",
    "test_resume",
    "test_launch",
    "test_zoo",
    "test_no_silent_keys",
    "test_scheduler",
)
# folders whose tests compile programs
COMPILING = (
    "inference",
    "kernels",
    "layers",
    "models",
    "optimizers",
    "parity",
    "sharding",
    "trainers",
)


def compiles(item):
    return item.path.relative_to(TESTS).parts[0] in COMPILING


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run the slowest files first, then the other files of COMPILING, so that all workers end at
    about the same time.

    Mark all but the first case of a compiling test as slow: each case compiles its own programs.
    """
    for item in items:
        marker = item.get_closest_marker("representative")
        if marker is not None and item.callspec.id not in marker.args:
            item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: (not item.path.name.startswith(SLOWEST_FILES), not compiles(item)))
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen and compiles(item):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def default_signals():
    """Do not ignore SIGHUP under nohup: every process that a test starts would ignore it, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def infrequent_garbage_collection():
    """Tracing creates many small long-lived objects, which make frequent collections slow."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def restored_logger():
    """Restore the package's logger after a test that configures it."""
    logger = logging.getLogger("maxtext")
    propagate, level, handlers = logger.propagate, logger.level, logger.handlers[:]
    yield
    logger.propagate, logger.handlers[:] = propagate, handlers
    logger.setLevel(level)


@pytest.fixture
def log_messages():
    """The list to which the messages of the package's logger are appended."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("maxtext")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def light_compiler(tmp_path_factory):
    """Runs have a persistent cache of compiled programs."""
    cache = str(tmp_path_factory.getbasetemp() / "jax_cache")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()
    yield cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    compilation_cache.reset_cache()


last_check = 0.0


@pytest.fixture(autouse=True)
def limit_memory_mappings():
    """Drop compiled programs before the process runs out of memory mappings and dies."""
    yield
    global last_check
    if time.monotonic() - last_check > 5 and MAPPINGS.exists():
        if MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
            jax.clear_caches()
            gc.collect()
        last_check = time.monotonic()
