"""The least recently used programs are dropped, and the client of the device has them no more."""

import contextlib
import gc
import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common.log import LOGGER
from maxtext.inference.engine import program_cache
from maxtext.inference.engine.program_cache import Compilation, ProgramCache


def num_executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_least_recently_used_program_is_dropped(monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_PROGRAMS", 2)
    traced = []

    def add_sum(state, x, y):
        traced.append(x.shape)
        return state + x.sum() + (0 if y is None else y.sum())

    cache = ProgramCache(jax.jit, add_sum, slice(1, None), donate_argnums=0)
    num_before = num_executables()

    def call(size, with_y=False):
        y = np.ones(size, np.float32) if with_y else None
        total = cache(jnp.zeros(()), np.ones(size, np.float32), y)
        assert float(total) == size * (1 + with_y)

    for size in (1, 2, 1, 3):  # 3 replaces 2
        call(size)
    assert traced == [(1,), (2,), (3,)]
    call(1)
    assert len(traced) == 3
    call(2)
    call(2, with_y=True)
    assert traced[3:] == [(2,), (2,)]
    assert cache._cache_size() == 2
    for size in range(4, 20):
        call(size)
    assert num_executables() - num_before <= 2 + 1  # and one that creates the state


@dataclass
class Batch:
    description: str


def test_compilation_is_watched_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(LOGGER, "propagate", True)
    compilation, states = Compilation(), []

    @contextlib.contextmanager
    def watch(x):
        with compilation.watch(Batch(f"prefill of {x.size} tokens")):
            states.append(compilation.state)
            yield

    cache = ProgramCache(jax.jit, lambda state, x: state + x.sum(), slice(1, None), watch)
    with caplog.at_level(logging.INFO, "maxtext"):
        for size, compilation.is_logged in ((1, False), (1, True), (2, True), (3, True)):
            compilation.warmup_step = "warm-up 4 of 12" if size == 3 else ""
            cache(jnp.zeros(()), np.ones(size, np.float32))
            assert compilation.state is None
    assert [(each["program"], each["num_compiled"]) for each in states] == [
        ("prefill of 1 tokens", 0),
        ("prefill of 2 tokens", 1),
        ("prefill of 3 tokens", 2),
    ]
    start, end, warmup, _ = (record.getMessage() for record in caplog.records)
    assert warmup == "compiling program 3, prefill of 3 tokens: warm-up 4 of 12"
    assert start == "compiling program 2, prefill of 2 tokens: requests wait"
    assert end.startswith("compiled program 2 in ")
