"""collect_stack_trace: dumps the stacks of all threads every stack_trace_interval_seconds.

The dumps come from a C thread (faulthandler), so they appear even while Python is blocked in a call
into the devices. Each starts with `Timeout (…)!`, which is how faulthandler reports the interval.
"""

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig


@contextlib.contextmanager
def stack_traces(config: MaxTextConfig, path: str | os.PathLike | None = None) -> Iterator[None]:
    """Dump stacks while the block runs, if collect_stack_trace is set: to standard error, or
    appended to `path`.
    """
    if not config.collect_stack_trace:
        yield
        return
    with contextlib.ExitStack() as stack:
        # faulthandler needs a file descriptor, which a replaced sys.stderr may not have.
        file: TextIO | None = sys.__stderr__
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a", encoding="utf-8"))
        seconds = config.stack_trace_interval_seconds
        LOGGER.info(
            "stack traces of all threads every %d s to %s", seconds, path or "standard error"
        )
        faulthandler.dump_traceback_later(seconds, repeat=True, file=file or 2)
        stack.callback(faulthandler.cancel_dump_traceback_later)  # before the file is closed
        yield
