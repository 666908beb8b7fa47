"""For all rooms."""

import gc
from functools import partial

import jax
import pytest

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


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


@pytest.fixture(scope="module")
def quick_programs():
    """Compiling is most of the time here, and most of that goes into making programs of a moment faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICK))
        yield
