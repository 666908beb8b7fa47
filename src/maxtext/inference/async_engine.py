"""An engine in its own thread, for servers: many threads or event loops submit requests, and each
receives the deltas of its requests.

Only this thread uses the engine; other threads send it commands through a queue. The output of a
step reaches each event loop in one call, so that many streams wake the loop only once per step.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from maxtext.common.errors import UserError
from maxtext.common.log import LOGGER
from maxtext.inference.engine.memory import Capacity
from maxtext.inference.engine.program_cache import Compilation
from maxtext.inference.engine.sequence import Sequence
from maxtext.inference.errors import EngineError
from maxtext.inference.llm import LLM
from maxtext.inference.requests import EngineStats, GenerationRequest
from maxtext.inference.text.session import EngineSession, PreparedRequest
from maxtext.inference.text.streams import (
    END,
    AsyncCompletionStream,
    BaseStream,
    CompletionStream,
    StreamItem,
    item_size,
)

MAX_FAILURES = 2  # of steps: the engine is created again after the first
MAX_BACKLOG = 256 * 1024  # characters and tokens that a consumer has not read
STALL_SECONDS = 30.0  # after which a request with such a backlog is dropped
MAX_RETRY_AFTER = 60.0
POLL_SECONDS = 0.1  # between checks of deadlines and backlogs
COMMAND_SECONDS = 0.02  # for commands between two steps
# Before a prefill, for requests that are being parsed: at most since the last one, and in all.
GATHER_SECONDS = 0.05
MAX_GATHER_SECONDS = 0.15
GATHER_POLL_SECONDS = 0.002
STREAM = TypeVar("STREAM", bound=BaseStream)
Event = tuple[BaseStream, StreamItem]


class AsyncEngine:
    """Runs the engine of an `LLM` in its own thread: up to `slots` sequences at a time, with up to
    `max_queue` more waiting. Any thread or event loop may submit requests at any time.

    `submit` returns a stream of deltas to iterate in a thread, and `submit_async` one to iterate in
    an event loop. If an engine step fails, all requests end with EngineError, and the engine is
    created again, once.
    """

    def __init__(
        self,
        llm: LLM,
        slots: int | None = None,
        length: int | None = None,
        max_queue: int = 1024,
    ):
        """Start the thread. `slots` and `length`, the largest number of tokens of a sequence,
        default to those of the configuration. Raises ConfigError if caches do not fit in memory."""
        self.llm = llm
        default = Capacity.from_config(llm.config)
        fits_slots = default.fits_slots and slots is None
        self.size = Capacity(slots or default.slots, length or default.length, fits_slots)
        self.engine = llm.engine_for(*self.size)
        self.compilation.is_logged = True
        self.capacity = self.engine.cache_config.slots + max_queue  # sequences
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # of the next four
        self.open_streams: dict[int, BaseStream] = {}  # of unfinished requests, by id
        self.num_open = 0  # their unfinished sequences
        self.num_arriving = 0  # requests that are received but not submitted
        self.status = "ready"  # draining, engine_failed
        self.request_ids = itertools.count()
        self.idle = threading.Event()  # no request is open
        self.idle.set()
        self.stats = EngineStats()
        self.on_step: Callable[[int], None] | None = None  # gets the number of tokens of a step
        # The rest belongs to the thread.
        self.session = EngineSession(self.engine, llm.tokenizer)
        self.streams: dict[int, BaseStream] = {}
        self.events: list[Event] = []
        self.num_failures = 0
        self.generation_tokens = 0  # of engines before a failure
        self.checked_at = 0.0
        self.seconds_per_request = 1.0  # that leaves the engine, as a moving average
        self.finished_at = time.monotonic()
        self.stopping = False
        self.updates: list[tuple[Callable[[], None], Future[None]]] = []
        # Requests that wait for an update, by id.
        self.held: dict[int, PreparedRequest] = {}
        self.thread = threading.Thread(target=self.run, name="maxtext-engine", daemon=True)
        self.thread.start()

    # For callers, in any thread.

    @property
    def compilation(self) -> Compilation:
        """Requests wait while the engine's thread compiles a program."""
        return self.engine.programs.compilation

    def submit(self, request: GenerationRequest, timeout: float | None = None) -> CompletionStream:
        """Queue a request, and return its stream for a consumer in a thread.

        The request is tokenized and checked in the caller's thread. Raises UserError if it is
        invalid, and EngineError if the queue is full or the engine does not accept requests. If the
        last token has not been sampled `timeout` seconds from now, the stream raises EngineError.
        """
        return self.open_stream(CompletionStream, self.prepare(request), timeout)

    def submit_async(
        self, prepared: PreparedRequest, timeout: float | None = None
    ) -> AsyncCompletionStream:
        """Queue a prepared request, and return its stream for a consumer in the running event loop.
        Raises EngineError as `submit` does.
        """
        return self.open_stream(AsyncCompletionStream, prepared, timeout)

    def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Tokenize and check a request, and compile its grammar, which may take seconds. Raises
        UserError if the request is invalid.
        """
        return self.llm.prepare(self.engine, request)

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Announce a request that will be submitted right after the block, so that requests which
        arrive together are prefilled together.
        """
        with self.lock:
            self.num_arriving += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_arriving -= 1

    def open_stream(
        self, kind: type[STREAM], prepared: PreparedRequest, timeout: float | None
    ) -> STREAM:
        request = prepared.request
        num_choices = request.params.n
        with self.lock:
            self.check_accepts(num_choices)
            self.num_open += num_choices
            self.idle.clear()
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        prompt_ids = tuple(map(int, request.prompt))
        stream = kind(next(self.request_ids), prompt_ids, num_choices, self.cancel, deadline)
        with self.lock:
            self.open_streams[stream.request_id] = stream
        self.commands.put(lambda: self.start(stream, prepared))
        return stream

    def check_accepts(self, num_choices: int) -> None:
        """Raise EngineError unless a request may be queued now."""
        if self.status == "draining":
            raise EngineError("the engine is shutting down", "draining", retry_after=1.0)
        if self.status == "engine_failed":
            raise EngineError("the engine has failed", "engine_failed", retry_after=30.0)
        if self.num_open and self.num_open + num_choices > self.capacity:
            excess = self.num_open + num_choices - self.capacity
            raise EngineError(
                f"the queue is full: {self.num_open} sequences are running or waiting",
                "queue_full",
                retry_after=min(max(excess * self.seconds_per_request, 1.0), MAX_RETRY_AFTER),
            )

    def cancel(self, request_id: int) -> None:
        """Drop a request. Its slots and blocks are freed after the step in progress."""
        self.commands.put(lambda: self.end(request_id, END))

    def update(self, function: Callable[[], None]) -> Future[None]:
        """Call a function that changes the model, such as one that loads an adapter, when the
        requests that are running now have finished. Requests that arrive meanwhile wait. The future
        is done when the function has returned, or has its exception.
        """
        future: Future[None] = Future()
        self.commands.put(lambda: self.updates.append((function, future)))
        return future

    def drain(self, timeout: float) -> bool:
        """Accept no more requests, drop the waiting requests, and wait for the running requests.
        After `timeout` seconds, drop these as well. Returns whether all running requests finished.

        Consumers of dropped requests receive an EngineError at once, even if the engine's thread is
        in a step that compiles a program.
        """
        with self.lock:
            if self.status == "ready":
                self.status = "draining"
            open_streams = list(self.open_streams.values())
        waiting = [stream for stream in open_streams if not self.has_begun(stream)]
        self.end_streams(waiting)
        num_running = len(open_streams) - len(waiting)
        LOGGER.warning("draining, %d running; dropped %d waiting", num_running, len(waiting))
        finished = self.idle.wait(timeout)
        if not finished:
            with self.lock:
                open_streams = list(self.open_streams.values())
            LOGGER.warning("%d were not finished after %g seconds", len(open_streams), timeout)
            self.end_streams(open_streams)
        return finished

    def has_begun(self, stream: BaseStream) -> bool:
        """Whether a choice of a request has a slot, or had one. The engine's thread may be in a
        step.
        """
        sequence_ids = set(self.session.sequences.get(stream.request_id, ()))
        running = {sequence.request_id for sequence in list(self.engine.scheduler.running)}
        return bool(stream.num_put or sequence_ids & running)

    def end_streams(self, streams: Iterable[BaseStream]) -> None:
        """Drop requests because the engine shuts down. Their streams end now; the engine forgets
        them after the step in progress.
        """
        error = self.draining_error()
        for stream in streams:
            send([(stream, error)], stream.loop)
            self.cancel(stream.request_id)

    def close(self, timeout: float | None = None) -> bool:
        """End the thread, and drop unfinished requests. Returns False if the step in progress,
        which may compile a program, takes longer than `timeout` seconds.
        """
        with self.lock:
            if self.status == "ready":
                self.status = "draining"
        self.commands.put(None)
        self.thread.join(timeout)
        return not self.thread.is_alive()

    @staticmethod
    def draining_error() -> EngineError:
        return EngineError("the engine is shutting down", "draining", retry_after=1.0)

    # The thread.

    def run(self) -> None:
        while not self.stopping:
            with self.engine.lease(expects_requests=True):
                self.serve()
            self.recover()
            self.run_updates()
        self.end_all(self.draining_error())
        self.publish()

    def serve(self) -> None:
        """Run commands and steps until the engine fails or is closed, or an update can run."""
        while not self.stopping and not self.engine.failed:
            if self.updates and not self.session.has_unfinished:
                return
            try:
                self.run_commands(wait=not self.session.has_unfinished)
                self.gather()
                if self.session.has_unfinished:
                    self.step()
                self.check_streams()
            except Exception:
                LOGGER.exception("the engine failed")
                self.engine.failed = True
            self.publish()

    def run_updates(self) -> None:
        updates, self.updates = self.updates, []
        for function, future in updates:
            try:
                if self.stopping:
                    raise self.draining_error()
                function()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
        if not self.stopping and self.engine.programs is not self.llm.programs:
            self.engine.executor.release()
            self.replace_engine()
        held, self.held = self.held, {}
        for request_id, prepared in held.items():
            self.start(self.streams[request_id], prepared)

    def replace_engine(self) -> None:
        self.generation_tokens += self.session.num_generated
        try:
            self.engine = self.llm.engine_for(*self.size)
        except UserError as error:  # others may have taken its memory
            LOGGER.error("the engine cannot be created again: %s", error)
            self.status, self.stopping = "engine_failed", True
            return
        self.compilation.is_logged = True
        self.session = EngineSession(self.engine, self.llm.tokenizer)

    def step(self) -> None:
        num_before = self.engine.num_prefilled + self.session.num_generated
        deltas = self.session.step()
        if self.on_step is not None:
            num_tokens = self.engine.num_prefilled + self.session.num_generated
            self.on_step(num_tokens - num_before)
        streams = [self.streams[delta.index] for delta in deltas]
        for stream, delta in zip(streams, deltas, strict=True):
            stream.num_put += item_size(delta)
            self.events.append((stream, delta))
            if delta.completion is not None:
                self.count_finished(stream, 1)

    def run_commands(self, wait: bool, timeout: float | None = None) -> None:
        """Run the commands in the queue; with `wait`, wait up to `timeout` seconds for the first.
        While sequences run, only COMMAND_SECONDS are spent on commands between two steps.
        """
        end = time.monotonic() + COMMAND_SECONDS
        while not self.stopping:
            try:
                command = self.commands.get(block=wait, timeout=timeout)
            except queue.Empty:
                return
            wait = False
            if command is None:
                self.stopping = True
            else:
                command()
            if self.engine.scheduler.running and time.monotonic() > end:
                return

    def gather(self) -> None:
        """Before a prefill that is not full, wait for requests that are being parsed. A burst of
        requests is then prefilled and decoded together, instead of by many programs for a few
        requests each. While most slots are in use, running requests do not wait.
        """
        scheduler = self.engine.scheduler
        deadline = time.monotonic() + MAX_GATHER_SECONDS
        num_waiting, end = 0, deadline
        while (
            scheduler.waiting
            and self.num_arriving
            and scheduler.has_low_load
            and not scheduler.has_full_batch
            and not self.stopping
        ):
            now = time.monotonic()
            if len(scheduler.waiting) > num_waiting:
                num_waiting, end = len(scheduler.waiting), min(now + GATHER_SECONDS, deadline)
            if now >= end:
                break
            self.run_commands(wait=True, timeout=GATHER_POLL_SECONDS)
        self.run_commands(wait=False)  # what came since the last of these waits ended

    def start(self, stream: BaseStream, prepared: PreparedRequest) -> None:
        self.streams[stream.request_id] = stream
        adapter = prepared.adapter
        if self.updates:
            self.held[stream.request_id] = prepared
        elif adapter and self.llm.adapters.loaded.get(adapter.name) is not adapter:
            self.held[stream.request_id] = prepared  # it was never started
            error = f"the adapter {adapter.name} was dropped"
            self.end(stream.request_id, EngineError(error, "adapter_dropped"))
        else:
            self.session.add(stream.request_id, prepared)

    def end(self, request_id: int, item: StreamItem) -> None:
        """Drop a request; `item` is the last of its stream. An unknown id is ignored."""
        stream = self.streams.get(request_id)
        if stream is None:
            return
        num_unfinished = len(self.session.sequences.get(request_id, ()))
        if self.held.pop(request_id, None) is not None:
            num_unfinished = stream.num_choices
        if self.engine.failed:  # its scheduler may be inconsistent
            self.session.sequences.pop(request_id, None)
        else:
            self.session.abort(request_id)
        self.events.append((stream, item))
        self.count_finished(stream, num_unfinished)

    def end_all(self, error: EngineError) -> None:
        for request_id in list(self.streams):
            self.end(request_id, error)

    def count_finished(self, stream: BaseStream, count: int) -> None:
        """Count finished choices, and forget the stream after its last."""
        is_last = stream.request_id not in self.session.sequences
        if is_last:
            self.streams.pop(stream.request_id, None)
        now = time.monotonic()
        self.seconds_per_request += 0.1 * (now - self.finished_at - self.seconds_per_request)
        self.finished_at = now
        with self.lock:
            if is_last:
                self.open_streams.pop(stream.request_id, None)
            self.num_open -= count
            if not self.num_open:
                self.idle.set()

    def check_streams(self) -> None:
        """Drop requests whose deadline has passed or whose consumer does not read."""
        now = time.monotonic()
        if now - self.checked_at < POLL_SECONDS:
            return
        self.checked_at = now
        for request_id, stream in list(self.streams.items()):
            if now > stream.deadline:
                self.end(request_id, stream.timeout_error())
            elif stream.backlog > MAX_BACKLOG and now - stream.read_at > STALL_SECONDS:
                message = f"no delta was read for {STALL_SECONDS:.0f} seconds"
                self.end(request_id, EngineError(message, "slow_consumer"))

    def publish(self) -> None:
        """Send the events to their streams, with one call for each event loop."""
        self.update_stats()
        by_loop: dict[asyncio.AbstractEventLoop | None, list[Event]] = defaultdict(list)
        for stream, item in self.events:
            by_loop[stream.loop].append((stream, item))
        self.events = []
        for loop, events in by_loop.items():
            if not send(events, loop):  # nobody reads
                for stream, _ in events:
                    self.end(stream.request_id, END)

    def recover(self) -> None:
        """After a failure, end all requests and create the engine again, once."""
        if not self.engine.failed:
            return
        self.num_failures += 1
        self.end_all(EngineError("a step of the engine failed", "engine_failed", retry_after=1.0))
        self.publish()
        if self.num_failures >= MAX_FAILURES:
            with self.lock:
                self.status = "engine_failed"
            self.stopping = True
            return
        self.engine.executor.release()  # the device may not have the memory for both caches
        self.replace_engine()

    def update_stats(self) -> None:
        scheduler, cache = self.engine.scheduler, self.engine.prefix_cache
        self.stats = EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=cache.pool.num_blocks,
            num_blocks_in_use=cache.pool.num_referenced,
            num_blocks_cached=len(cache.idle),
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=cache.hits + cache.misses,
            prefix_cache_hits=cache.hits,
            generation_tokens=self.generation_tokens + self.session.num_generated,
            num_drafts=self.engine.drafts.num_drafts,
            num_draft_tokens=self.engine.drafts.num_drafted,
            num_accepted_tokens=self.engine.drafts.num_accepted,
            running_adapters=self.adapter_names(scheduler.running),
            waiting_adapters=self.adapter_names(scheduler.waiting),
        )

    def adapter_names(self, sequences: Iterable[Sequence]) -> tuple[str, ...]:
        """The names of the adapters that these sequences use."""
        loaded = self.llm.adapters.loaded
        if not loaded:
            return ()
        slots = {sequence.adapter_slot for sequence in sequences}
        return tuple(sorted(name for name, adapter in loaded.items() if adapter.slot in slots))


def send(events: Iterable[Event], loop: asyncio.AbstractEventLoop | None) -> bool:
    """Put items into their streams, in the thread of their event loop, if they have one; returns
    False if the loop is closed.
    """
    if loop is None:
        put_all(events)
        return True
    try:
        loop.call_soon_threadsafe(put_all, events)
    except RuntimeError:
        return False
    return True


def put_all(events: Iterable[Event]) -> None:
    for stream, item in events:
        stream.put(item)
