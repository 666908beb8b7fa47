"""Compiled programs of a function, of which the least recently used are dropped.

Every combination of shapes and of kinds of sampling is a program of some megabytes. Mixed traffic
meets hundreds of them in an hour, most of them once.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

MAX_PROGRAMS = 128  # of a function; one takes about 8 MiB on a CPU


class ProgramCache:
    """A compiled function, with at most MAX_PROGRAMS programs."""

    def __init__(
        self,
        jit: Callable[..., Any],
        function: Callable[..., Any],
        shaped_args: slice,
        **options: Any,
    ):
        """The arguments `shaped_args` determine the program: the shapes of others do not vary.
        `options` are those of `jit`.
        """
        self.jit = jit
        self.function = function
        self.shaped_args = shaped_args
        self.options = options
        self.programs: OrderedDict[Hashable, Any] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args[self.shaped_args])
        key = structure, tuple(map(np.shape, leaves))
        program = self.programs.get(key)
        if program is None:
            # Programs of equal functions would share a cache, so each has a function of its own.
            program = self.jit(functools.partial(self.function), **self.options)
            self.programs[key] = program
        self.programs.move_to_end(key)
        while len(self.programs) > MAX_PROGRAMS:
            _, dropped = self.programs.popitem(last=False)
            dropped.clear_cache()
        return program(*args)

    def _cache_size(self) -> int:
        """Compiled programs, as of `jax.jit`."""
        return sum(program._cache_size() for program in self.programs.values())
