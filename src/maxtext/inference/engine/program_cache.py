"""Compiled programs of a function, of which the least recently used are dropped.

Every combination of shapes and of kinds of sampling is a program of some megabytes. Mixed traffic
meets hundreds of them in an hour, most of them once.
"""

import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import jax
import numpy as np
from jax import monitoring

from maxtext.common.log import LOGGER
from maxtext.common.types import Json

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # an event of JAX
MAX_PROGRAMS = 128  # of a function; one takes about 8 MiB on a CPU
# For decoding with adapters on GPUs: kernels that do not depend on each other run at the same time,
# as the matmuls of a layer by its weight and by the A factors of its adapters, which are too small
# to fill a GPU; and matmuls of one input are not merged, which would copy their weights in each
# step.
ADAPTER_OPTIONS = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_dot_merger_threshold_mb": 0,
}


class Compilation:
    """Which program is compiled now. The thread that runs programs writes it; others may read
    `state` at any time.
    """

    def __init__(self) -> None:
        self.is_logged = False  # servers do: requests wait for it
        self.warmup_step = ""  # such as "warm-up 3 of 12"; empty: requests wait
        self.num_compiled = 0
        self.running: tuple[str, float] | None = None  # description of the program, start

    @contextlib.contextmanager
    def watch(self, batch: "HasDescription", *args: object) -> Iterator[None]:
        """Around the first run of the program for a batch."""
        number, start = self.num_compiled + 1, time.monotonic()
        self.running = batch.description, start
        if self.is_logged:
            reason = self.warmup_step or "requests wait"
            LOGGER.info("compiling program %d, %s: %s", number, batch.description, reason)
        try:
            yield
            self.num_compiled = number
        finally:
            self.running = None
        if self.is_logged:
            LOGGER.info("compiled program %d in %.1f s", number, time.monotonic() - start)

    @property
    def state(self) -> Json | None:
        """The program, how long it has taken, and how many were compiled before it; None if none
        is compiled.
        """
        running = self.running
        if running is None:
            return None
        program, start = running
        seconds = round(time.monotonic() - start, 1)
        return {"program": program, "seconds": seconds, "num_compiled": self.num_compiled}


class CacheHits:
    """Counts the programs that JAX has read from its persistent cache instead of compiling them."""

    def __init__(self) -> None:
        self.count = 0
        monitoring.register_event_listener(self.on_event)

    def on_event(self, event: str, **_: str | int) -> None:
        self.count += event == CACHE_HIT


@functools.cache
def cache_hits() -> CacheHits:
    return CacheHits()  # once: JAX keeps its listeners


def num_cache_hits() -> int:
    """Programs from the persistent cache since the first call."""
    return cache_hits().count


class HasDescription(Protocol):
    """A batch that says what its program does."""

    @property
    def description(self) -> str: ...


ARGS = ParamSpec("ARGS")
RESULT_co = TypeVar("RESULT_co", covariant=True)


class Program(Protocol[ARGS, RESULT_co]):
    """A function as `jax.jit` returns it."""

    def __call__(self, *args: ARGS.args, **kwargs: ARGS.kwargs) -> RESULT_co: ...

    def eval_shape(self, *args: ARGS.args, **kwargs: ARGS.kwargs) -> RESULT_co: ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...

    def clear_cache(self) -> None: ...

    def _cache_size(self) -> int: ...


def jit(function: Callable[ARGS, RESULT_co], **options: Any) -> Program[ARGS, RESULT_co]:
    """`jax.jit`, whose result has the types of the function."""
    return cast("Program[ARGS, RESULT_co]", jax.jit(function, **options))


class ProgramCache(Generic[ARGS, RESULT_co]):
    """A compiled function, with at most MAX_PROGRAMS programs."""

    def __init__(
        self,
        jit: Callable[..., Program[ARGS, RESULT_co]],
        function: Callable[ARGS, RESULT_co],
        shaped_args: slice,
        watch: Callable[..., contextlib.AbstractContextManager[None]] | None = None,
        **options: Any,
    ):
        """The arguments `shaped_args` determine the program: the shapes of others do not vary.
        `watch` gets them, and is entered while a program is compiled. `options` are those of `jit`.
        """
        self.jit = jit
        self.function = function
        self.shaped_args = shaped_args
        self.watch = watch
        self.options = options
        self.programs: OrderedDict[Hashable, Program[ARGS, RESULT_co]] = OrderedDict()

    def __call__(self, *args: ARGS.args, **kwargs: ARGS.kwargs) -> RESULT_co:
        program, is_new = self.find(args[self.shaped_args])
        if not is_new:
            return program(*args, **kwargs)
        with self.watched(args):
            return program(*args, **kwargs)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The program for these arguments, of which those that no batch has may be shapes with
        shardings. A later call with such arrays runs it without compiling it again."""
        program, _ = self.find(args[self.shaped_args])
        with self.watched(args):
            return program.lower(*args).compile()

    def find(self, shaped_args: tuple[object, ...]) -> tuple[Program[ARGS, RESULT_co], bool]:
        """The program for arguments of these shapes, and whether it is new."""
        leaves, structure = jax.tree.flatten(shaped_args)
        key = structure, tuple(map(np.shape, leaves))
        program = self.programs.get(key)
        if program is not None:
            self.programs.move_to_end(key)
            return program, False
        # Programs of equal functions would share a cache, so each has a function of its own.
        program = self.programs[key] = self.jit(functools.partial(self.function), **self.options)
        while len(self.programs) > MAX_PROGRAMS:
            _, dropped = self.programs.popitem(last=False)
            dropped.clear_cache()
        return program, True

    def watched(self, args: tuple[object, ...]) -> contextlib.AbstractContextManager[None]:
        return self.watch(*args[self.shaped_args]) if self.watch else contextlib.nullcontext()

    def _cache_size(self) -> int:
        """Compiled programs, as of `jax.jit`."""
        return sum(program._cache_size() for program in self.programs.values())
