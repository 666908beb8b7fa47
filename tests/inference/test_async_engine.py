"""The engine in a thread: many streams at a time, each equal to what `LLM.generate` returns."""

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxtext.inference import AsyncEngine, EngineError, GenerationRequest, SamplingParams
from maxtext.inference import async_engine as module
from maxtext.inference.engine.executor import Executor
from maxtext.inference.requests import CompletionDelta
from maxtext.inference.text.streams import END, AsyncCompletionStream
from maxtext.inference.validation import RequestError

pytestmark = pytest.mark.usefixtures("few_programs")
LONG = {"max_new_tokens": 110, "ignore_eos": True}


@pytest.fixture
def engine(llm):
    engine = AsyncEngine(llm, slots=8, length=128, max_queue=200)
    yield engine
    engine.close()
    assert llm.engine is None or not any(each.leased for each in llm.engines)


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def is_free(engine):
    return engine.stats.num_blocks_in_use == engine.stats.num_running == engine.num_open == 0


def requests(count):
    """Of many lengths, greedy and sampled, some with two choices."""
    return [
        GenerationRequest(
            f"w{3 + index % 50} w{5 + index % 7}",
            SamplingParams(
                temperature=(index % 3) / 2,
                max_new_tokens=3 + index % 11,
                seed=index,
                n=1 + (index % 8 == 0),
                ignore_eos=True,
            ),
        )
        for index in range(count)
    ]


@pytest.mark.slow
def test_64_streams(llm, engine):
    """Half of them in one event loop, half in threads of their own; from both, deltas make up the
    text, and the completions are those of `LLM.completions`.
    """
    given = requests(64)
    texts, completions = {}, {}

    def add(index, delta):
        key = index, delta.choice
        texts[key] = texts.get(key, "") + delta.text
        if delta.completion is not None:
            completions[key] = delta.completion

    def consume(index):
        for delta in engine.submit(given[index]):
            add(index, delta)

    async def consume_async(index):
        prepared = await asyncio.to_thread(engine.prepare, given[index])
        async for delta in engine.submit_async(prepared):
            add(index, delta)

    async def consume_all():
        await asyncio.gather(*(consume_async(index) for index in range(0, 64, 2)))

    threads = [threading.Thread(target=consume, args=[index]) for index in range(1, 64, 2)]
    for thread in threads:
        thread.start()
    asyncio.run(consume_all())
    for thread in threads:
        thread.join()
    expected = {(each.index, each.choice): each for each in llm.completions(given)}
    assert {key: each.token_ids for key, each in completions.items()} == {
        key: each.token_ids for key, each in expected.items()
    }
    assert texts == {key: each.text for key, each in expected.items()}
    wait_until(lambda: is_free(engine))
    assert engine.stats.generation_tokens == sum(len(e.token_ids) for e in expected.values())


@pytest.fixture
def programs(monkeypatch):
    """The programs that run: ("prefill", prompts) and ("decode", steps)."""
    programs = []
    prefill, decode = Executor.prefill, Executor.decode

    def run_prefill(self, batch):
        programs.append(("prefill", int((batch.slots < self.cache_config.slots).sum())))
        return prefill(self, batch)

    def run_decode(self, batch):
        programs.append(("decode", int(batch.num_steps)))
        return decode(self, batch)

    monkeypatch.setattr(Executor, "prefill", run_prefill)
    monkeypatch.setattr(Executor, "decode", run_decode)
    return programs


@pytest.fixture
def patient(monkeypatch):
    """An engine waits for a minute for requests that arrive."""
    monkeypatch.setattr(module, "GATHER_SECONDS", 60.0)
    monkeypatch.setattr(module, "MAX_GATHER_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_requests_that_arrive_together_are_prefilled_together(engine, programs):
    with engine.arrival():  # of the second request
        first = engine.submit(GenerationRequest("w5 w6", SamplingParams(**LONG)))
        time.sleep(0.3)
        assert not programs
        second = engine.submit(GenerationRequest("w7 w8", SamplingParams(**LONG)))
    next(first), next(second)
    assert programs[0] == ("prefill", 2)


@pytest.mark.parametrize("other", ["GATHER_SECONDS", "MAX_GATHER_SECONDS"])
def test_request_that_does_not_come_delays_others_for_a_moment_only(engine, monkeypatch, other):
    monkeypatch.setattr(module, other, 3600.0)  # one of the limits is enough
    with engine.arrival():
        assert list(engine.submit(GenerationRequest("w5", SamplingParams(max_new_tokens=2))))


@pytest.mark.parametrize(("num_running", "num_new"), [(4, 4), (0, 8)])  # of 8 slots
def test_busy_engine_and_full_batch_wait_for_no_request(engine, request, num_running, num_new):
    if num_running:
        running = engine.submit(GenerationRequest("w5", SamplingParams(n=num_running, **LONG)))
        next(running)
    request.getfixturevalue("patient")
    start = time.monotonic()
    with engine.arrival():
        streams = [
            engine.submit(GenerationRequest(f"w{index}", SamplingParams(max_new_tokens=2)))
            for index in range(6, 6 + num_new)
        ]
        assert all(list(stream)[-1].completion for stream in streams)
    assert time.monotonic() - start < 50
    if num_running:
        running.cancel()


def test_running_sequences_do_not_wait_for_many_commands(engine, monkeypatch):
    running = engine.submit(GenerationRequest("w5", SamplingParams(**LONG)))
    next(running)
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.0)
    submitted, num_waiting = threading.Event(), []

    def step(run=engine.step):
        num_waiting.append(len(engine.engine.scheduler.waiting))
        submitted.wait(60)
        run()

    monkeypatch.setattr(engine, "step", step)
    params = SamplingParams(max_new_tokens=2)
    streams = [engine.submit(GenerationRequest(f"w{index}", params)) for index in range(6, 12)]
    submitted.set()
    assert all(list(stream)[-1].completion for stream in streams)
    running.cancel()
    assert 0 < max(num_waiting) < len(streams) / 2


def test_decode_programs_are_short_while_most_slots_are_free(llm, engine, programs, monkeypatch):
    """A request that arrives waits for the program that runs. Offline, none arrives."""
    monkeypatch.setattr(
        "maxtext.inference.engine.engine.STEP_SECONDS", 60.0
    )  # any number of steps fits
    params = SamplingParams(**LONG)

    def longest():
        steps = max(count for kind, count in programs if kind == "decode")
        programs.clear()
        return steps

    list(engine.submit(GenerationRequest("w5", params)))
    assert longest() == 2
    streams = [engine.submit(GenerationRequest(f"w{index}", params)) for index in range(5, 10)]
    assert all(list(stream) for stream in streams)
    assert longest() == 16
    list(llm.run([GenerationRequest("w5", params)], slots=8, length=128))
    assert longest() == 16


def test_cancelled_request_frees_its_blocks(engine):
    """Running and waiting requests, from another thread, with all of their choices."""
    running = engine.submit(GenerationRequest("w5", SamplingParams(n=8, **LONG)))
    waiting = engine.submit(GenerationRequest("w6", SamplingParams(**LONG)))
    next(running)
    assert engine.stats.num_waiting + engine.stats.num_running > 0
    waiting.cancel()
    assert list(waiting) == []
    running.cancel()
    running.cancel()
    assert not any(delta.completion for delta in running)
    wait_until(lambda: is_free(engine))
    assert engine.stats.generation_tokens < 8 * 110
    assert len(list(engine.submit(GenerationRequest("w5")))) > 0


def test_full_queue_and_deadlines(llm, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    engine = AsyncEngine(llm, slots=8, length=128, max_queue=2)
    try:
        stream = engine.submit(GenerationRequest("w5", SamplingParams(n=10, **LONG)))
        with pytest.raises(EngineError, match="the queue is full: 10 sequences") as caught:
            engine.submit(GenerationRequest("w6"))
        assert (caught.value.code, caught.value.retry_after >= 1) == ("queue_full", True)
        stream.cancel()
        wait_until(lambda: is_free(engine))
        late = engine.submit(GenerationRequest("w5", SamplingParams(**LONG)), timeout=0.0)
        with pytest.raises(EngineError, match="not finished after") as caught:
            list(late)
        assert caught.value.code == "request_timeout"
        wait_until(lambda: is_free(engine))
    finally:
        engine.close()


def test_deadline_ends_a_stream_during_a_step(engine):
    """A step may compile a program, which takes seconds."""
    release = threading.Event()
    engine.on_step = lambda _: release.wait(20)

    async def consume():
        start = time.monotonic()
        prepared = engine.prepare(GenerationRequest("w5", SamplingParams(**LONG)))
        stream = engine.submit_async(prepared, timeout=0.3)
        with pytest.raises(EngineError, match="not finished after 0 seconds") as caught:
            async for _ in stream:
                pass
        return caught.value.code, time.monotonic() - start

    try:
        code, seconds = asyncio.run(consume())
    finally:
        release.set()
    assert code == "request_timeout"
    assert 0.3 <= seconds < 10
    wait_until(lambda: is_free(engine))


def test_invalid_requests_are_refused_by_the_caller(engine):
    for request, param in (
        (GenerationRequest([5, 99]), "prompt"),
        (GenerationRequest("w5", SamplingParams(logit_bias={61: 1})), "logit_bias"),
        (GenerationRequest("w5", SamplingParams(max_new_tokens=0)), "max_new_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(request)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        engine.submit(GenerationRequest([5] * 100, SamplingParams(max_new_tokens=29)))
    assert caught.value.code == "context_length_exceeded"
    assert is_free(engine)


def test_drain_finishes_what_is_running(llm):
    engine = AsyncEngine(llm, slots=8, length=128)
    running = engine.submit(GenerationRequest("w5", SamplingParams(n=8, **LONG)))
    next(running)
    waiting = engine.submit(GenerationRequest("w6", SamplingParams(**LONG)))
    assert engine.drain(60)
    assert len([delta for delta in running if delta.completion]) == 8
    with pytest.raises(EngineError) as caught:
        list(waiting)
    assert caught.value.code == "draining"
    with pytest.raises(EngineError, match="shutting down"):
        engine.submit(GenerationRequest("w5"))
    engine.close()
    assert not engine.thread.is_alive()


def test_drain_that_takes_too_long(llm):
    engine = AsyncEngine(llm, slots=8, length=128)
    stream = engine.submit(GenerationRequest("w5", SamplingParams(**LONG)))
    next(stream)
    assert not engine.drain(0.0)
    with pytest.raises(EngineError, match="shutting down"):
        list(stream)
    engine.close()


def test_drain_while_a_program_is_compiled(llm, monkeypatch, caplog):
    """Nobody waits for the engine's thread: not the consumers, and not the end of the process."""
    engine = AsyncEngine(llm, slots=8, length=128)
    compiles, may_go_on = threading.Event(), threading.Event()
    prefill = Executor.prefill

    def slow_prefill(*arguments):
        compiles.set()
        assert may_go_on.wait(60)
        return prefill(*arguments)

    monkeypatch.setattr(Executor, "prefill", slow_prefill)
    try:
        running = engine.submit(GenerationRequest("w5", SamplingParams(n=8, **LONG)))
        assert compiles.wait(60)
        waiting = [engine.submit(GenerationRequest("w6", SamplingParams(**LONG))) for _ in range(3)]
        with ThreadPoolExecutor(1) as thread:
            drained = thread.submit(engine.drain, 1.0)
            for stream in waiting:
                with pytest.raises(EngineError, match="shutting down"):
                    list(stream)
            assert not drained.done()
            assert not drained.result()
        with pytest.raises(EngineError, match="shutting down"):
            list(running)
        assert "draining, 1 running" in caplog.text
        assert not engine.close(timeout=0.1)
    finally:
        may_go_on.set()
    assert engine.close(timeout=60)
    assert is_free(engine)


def test_failed_engine_is_created_again_once(llm, monkeypatch):
    engine = AsyncEngine(llm, slots=8, length=128)
    request = GenerationRequest("w5 w9", SamplingParams(max_new_tokens=5, ignore_eos=True))
    expected = "".join(delta.text for delta in engine.submit(request))

    def broken(*arguments):
        raise RuntimeError("the device is gone")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "prefill", broken)
            with pytest.raises(EngineError) as caught:
                list(engine.submit(request))
            assert caught.value.code == "engine_failed"
        if engine.num_failures == 1:
            assert "".join(delta.text for delta in engine.submit(request)) == expected
    wait_until(lambda: engine.status == "engine_failed")
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(request)
    engine.close()


def test_update_runs_between_requests(engine):
    """It waits for those that run, and those that come wait for it."""
    running = engine.submit(GenerationRequest("w5", SamplingParams(**LONG)))
    next(running)
    seen = []
    future = engine.update(lambda: seen.append(engine.stats.num_running))
    waiting = [engine.submit(GenerationRequest("w6", SamplingParams(**LONG))) for _ in range(3)]
    waiting[0].cancel()
    assert list(waiting[0]) == []
    future.result(60)
    assert seen == [0]
    assert running.is_finished or list(running)[-1].completion is not None
    assert [len(list(each)[-1].completion.token_ids) for each in waiting[1:]] == [110, 110]
    wait_until(lambda: is_free(engine))


def test_update_that_fails_leaves_the_engine_running(engine):
    def fail():
        raise ValueError("no such adapter")

    with pytest.raises(ValueError, match="no such adapter"):
        engine.update(fail).result(60)
    (*_, last) = engine.submit(GenerationRequest("w5", SamplingParams(max_new_tokens=2)))
    assert last.completion is not None


def test_drain_drops_requests_that_wait_for_an_update(llm):
    engine = AsyncEngine(llm, slots=8, length=128)
    running = engine.submit(GenerationRequest("w5", SamplingParams(**LONG)))
    next(running)
    future = engine.update(lambda: None)
    waiting = engine.submit(GenerationRequest("w6", SamplingParams(**LONG)))
    assert engine.drain(60)
    with pytest.raises(EngineError, match="shutting down"):
        list(waiting)
    engine.close()
    assert future.done()


def test_consumer_that_is_behind_lets_others_run():
    """Each task takes one delta at a time of those that wait."""
    deltas = [CompletionDelta(0, 0, "a", (1,)) for _ in range(3)]
    order = []

    async def consume(name):
        stream = AsyncCompletionStream(0, (), 1, lambda _: None, math.inf)
        for each in (*deltas, END):
            stream.put(each)
        async for _ in stream:
            order.append(name)

    async def run():
        await asyncio.gather(consume("a"), consume("b"))

    asyncio.run(run())
    assert order == ["a", "b"] * 3


def test_consumer_that_does_not_read_is_dropped(engine, monkeypatch):
    for name, value in (("MAX_BACKLOG", 10), ("STALL_SECONDS", 0.0), ("POLL_SECONDS", 0.0)):
        monkeypatch.setattr(module, name, value)
    stream = engine.submit(GenerationRequest("w5", SamplingParams(n=8, **LONG)))
    wait_until(lambda: is_free(engine))
    with pytest.raises(EngineError, match="no delta was read") as caught:
        list(stream)
    assert caught.value.code == "slow_consumer"
