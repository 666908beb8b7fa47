"""Run chat templates in another process (`template_worker.py`) with time and memory limits."""

import atexit
import contextlib
import importlib.util
import json
import os
import pickle
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.tokenizers.template_worker import HEADER_BYTES

RENDER_SECONDS = 10.0  # for one conversation; usual templates take less than a millisecond
MEMORY_BYTES = 2**30
START_SECONDS = 120.0  # to start Python and import jinja2 on a busy machine


class TemplateFailure(Exception):
    """`compiled`: the template is valid, but fails for these messages. `line`: of a syntax
    error.
    """

    def __init__(self, reason: str, compiled: bool = True, line: int | None = None):
        super().__init__(reason)
        self.compiled = compiled
        self.line = line


@dataclass(frozen=True)
class RenderedTemplate:
    """`spans`: the (start, end) in `text` of the `{% generation %}` blocks, if they were wanted."""

    text: str
    spans: list[tuple[int, int]]


class TemplateRunner:
    """One worker process for all templates of this process, started on demand. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def run(
        self, source: str, variable_sets: Sequence[Json], wants_spans: bool = False
    ) -> list[RenderedTemplate | TemplateFailure]:
        """Render a template with each of several sets of variables, all within one time limit.

        Raises TemplateFailure if the template is not valid, or cannot be run.
        """
        try:
            request = pickle.dumps((source, list(variable_sets), wants_spans))
        except Exception as error:  # a user's class can raise any type
            raise TemplateFailure(
                f"its messages cannot be sent to the process that runs it ({error})"
            ) from error
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
                self.exchange(pickle.dumps(("", [], False)), START_SECONDS)
            responses = [parse(entry) for entry in self.exchange(request, RENDER_SECONDS)]
        for response in responses:
            if isinstance(response, TemplateFailure) and not response.compiled:
                raise response
        return responses

    def start(self) -> None:
        self.stop()
        jinja2 = importlib.util.find_spec("jinja2")
        if jinja2 is None or jinja2.origin is None:
            raise ConfigError(
                "chat templates need jinja2: install it, for example with pip install jinja2"
            )
        worker = Path(__file__).with_name("template_worker.py")
        site_packages = Path(jinja2.origin).parents[1]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                str(worker),
                str(site_packages),
                str(RENDER_SECONDS),
                str(MEMORY_BYTES),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the main process
        )

    def exchange(self, request: bytes, seconds: float) -> list[Json]:
        """Send a request and return the worker's responses."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(len(request).to_bytes(HEADER_BYTES, "big") + request)
            self.process.stdin.flush()
            deadline = time.monotonic() + seconds
            handle = self.process.stdout.fileno()
            size = int.from_bytes(read_exactly(handle, HEADER_BYTES, deadline), "big")
            return json.loads(read_exactly(handle, size, deadline))
        except TimeoutError as error:
            self.stop()
            raise TemplateFailure(
                f"it takes more than {seconds:g} seconds: is there an endless loop?"
            ) from error
        except (BrokenPipeError, EOFError) as error:
            self.stop()
            raise TemplateFailure("the process that runs it has died") from error
        except BaseException:
            # after Ctrl-C the pending response would be read as that of the next request
            self.stop()
            raise

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def parse(response: Json) -> RenderedTemplate | TemplateFailure:
    if "text" in response:
        spans = [(start, end) for start, end in response["spans"]]
        return RenderedTemplate(response["text"], spans)
    return TemplateFailure(response["error"], response["compiled"], response.get("line"))


def read_exactly(handle: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while len(data) < size:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(handle, min(size - len(data), 2**20))
            if not chunk:
                raise EOFError
            data += chunk
    return bytes(data)


RUNNER = TemplateRunner()


def reset_runner() -> None:
    """In a forked process: the worker belongs to the parent."""
    global RUNNER
    RUNNER = TemplateRunner()


def run_template(
    source: str, variable_sets: Sequence[Json], wants_spans: bool = False
) -> list[RenderedTemplate | TemplateFailure]:
    """As `TemplateRunner.run`, in the worker of this process."""
    return RUNNER.run(source, variable_sets, wants_spans)


atexit.register(lambda: RUNNER.stop())
os.register_at_fork(after_in_child=reset_runner)
