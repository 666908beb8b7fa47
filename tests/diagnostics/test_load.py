"""The load generator: its client byte by byte, its arrivals, and its numbers against closed forms
and a server with known delays.
"""

import asyncio
import itertools
import json
import math
import statistics

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.diagnostics.load.client import Connection, RequestRecord, Target
from maxtext.diagnostics.load.generator import (
    LoadGenerator,
    LoadResult,
    ServerInfo,
    Workload,
    arrival_times,
    request_bodies,
)
from maxtext.diagnostics.load.report import load_figure, sentences, summarize, table, tokens_by_time
from tests.diagnostics.stub_server import chunk, event, run_stub


def record(started_at, first, gap, num_events, num_tokens, error=""):
    times = [started_at + first + gap * index for index in range(num_events)]
    return RequestRecord(
        prompt_tokens=10,
        new_tokens=num_tokens,
        started_at=started_at,
        finished_at=times[-1],
        status=200,
        error=error,
        event_times=times,
        completion_tokens=num_tokens,
    )


class Transport:
    def write(self, data):
        pass

    def abort(self):
        pass


def run(url, workload, **options):
    return asyncio.run(LoadGenerator(Target.from_url(url), workload, **options).run())


def test_percentiles_have_their_closed_form():
    """TTFT is 1 ms, 2 ms … 101 ms, and a request has 5 events 20 ms apart with 4 tokens each."""
    records = [record(index, (index + 1) / 1e3, 0.02, 5, 20) for index in range(101)]
    records.append(record(101, 9.0, 9.0, 5, 20, error="429"))
    result = LoadResult(records, started_at=0.0, finished_at=202.0)
    summary = summarize(result, Workload(streams=1, num_requests=102))
    numbers = summary["milliseconds"]
    assert [numbers["ttft"][name] for name in ("p50", "p90", "p99", "mean", "max")] == [
        51.0,
        91.0,
        100.0,
        51.0,
        101.0,
    ]
    assert numbers["end_to_end"]["p90"] == 91.0 + 80.0
    assert numbers["gap"]["p50"] == numbers["gap"]["p99"] == 20.0
    assert numbers["tpot"]["p50"] == round(80 / 19, 3)
    assert (summary["requests"], summary["new_tokens"]) == (101, 2020)
    assert (summary["tokens_per_second"], summary["requests_per_second"]) == (10.0, 0.5)
    assert summary["errors"] == {"429": 1}
    assert [row[0] for row in table(summary)][1:] == [
        "time to first token",
        "time per output token",
        "gap between events",
        "end to end",
    ]
    assert "1 x 429" in sentences(summary)[1]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_response_in_any_pieces(size):
    stream = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
        + chunk(event({"choices": [{"text": "a"}]}))
        + chunk(b": keep-alive\n\n")
        + chunk(event({"choices": [], "usage": {"completion_tokens": 7}}))
        + chunk(b"data: [DONE]\n\n")
        + chunk(b"")
    )

    async def receive():
        connection, seen = Connection(collect=True), RequestRecord(1, 7)
        connection.connection_made(Transport())
        task = asyncio.create_task(connection.send(b"request", seen))
        await asyncio.sleep(0)
        for start in range(0, len(stream), size):
            assert not task.done()
            connection.data_received(stream[start : start + size])
        await asyncio.wait_for(task, 5)
        return connection, seen

    connection, seen = asyncio.run(receive())
    assert (seen.status, seen.error, seen.completion_tokens) == (200, "", 7)
    assert len(seen.event_times) == 1
    assert seen.body.count(b"data: ") == 3
    assert connection.is_open


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"SSH-2.0\r\n\r\n", "connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "connection"),
        (b"x" * 70_000, "connection"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}", "503"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"\r\n" + chunk(event({"error": {"message": "late"}})) + chunk(b""),
            "error event",
        ),
    ],
)
def test_bad_responses(data, error):
    async def receive():
        connection, seen = Connection(), RequestRecord(1, 7)
        connection.connection_made(Transport())
        task = asyncio.create_task(connection.send(b"request", seen))
        await asyncio.sleep(0)
        connection.data_received(data)
        await asyncio.wait_for(task, 5)
        return seen

    assert asyncio.run(receive()).error == error


def test_closed_loop_measures_known_delays():
    """8 requests on 4 streams: two rounds of 60 + 4 x 20 ms."""
    with run_stub(first_delay=0.06, gap=0.02) as (stub, url):
        workload = Workload(
            streams=4, num_requests=8, prompt_tokens=(3, 9), new_tokens=(10, 10), seed=5
        )
        ticks = []
        result = run(url, workload, on_tick=ticks.append)
    summary = summarize(result, workload)
    numbers = summary["milliseconds"]
    assert (stub.most_open, len(stub.bodies)) == (4, 8)
    assert stub.num_connections <= 4 + 1  # they are used again
    assert (summary["requests"], summary["new_tokens"], summary["errors"]) == (8, 80, {})
    # A busy machine may add to the delays, but never shorten them.
    for name, least in (("ttft", 60), ("gap", 20), ("tpot", 80 / 9), ("end_to_end", 140)):
        assert least - 2 <= numbers[name]["p50"] <= least + 100, name
    assert 0.28 <= summary["seconds"] < 2
    assert all(body["ignore_eos"] and 3 <= len(body["prompt"]) <= 9 for body in stub.bodies)
    assert all(len(tick.records) <= 8 for tick in ticks)


def test_errors_are_counted_by_kind():
    faults = {1: 429, 2: "cut", 4: "no [DONE]", 5: 429, 6: 500}
    with run_stub(faults=faults) as (_, url):
        workload = Workload(streams=1, num_requests=9, prompt_tokens=(2, 2), new_tokens=(4, 4))
        result = run(url, workload)
    summary = summarize(result, workload)
    assert summary["errors"] == {"429": 2, "incomplete": 2, "500": 1}
    assert (summary["requests"], summary["new_tokens"]) == (4, 16)
    assert summary["first_error"] == "a fault"


def test_timeout():
    with run_stub(first_delay=30) as (_, url):
        workload = Workload(streams=2, num_requests=2, prompt_tokens=(2, 2), new_tokens=(4, 4))
        result = run(url, workload, timeout=0.2)
    assert [each.error for each in result.records] == ["timeout"] * 2


def test_open_loop_does_not_wait_for_responses():
    with run_stub(first_delay=0.5) as (stub, url):
        workload = Workload(rate=200, num_requests=20, prompt_tokens=(2, 2), new_tokens=(1, 1))
        result = run(url, workload)
    assert stub.most_open == 20
    assert not [each.error for each in result.records if each.error]
    starts = [each.started_at - result.started_at for each in result.records]
    planned = list(itertools.islice(arrival_times(200, 0), 20))
    assert all(start >= plan - 1e-3 for start, plan in zip(starts, planned, strict=True))


def test_infinite_rate_sends_all_at_once():
    with run_stub(first_delay=0.3) as (stub, url):
        workload = Workload(rate=math.inf, num_requests=50, prompt_tokens=(2, 2), new_tokens=(1, 1))
        result = run(url, workload)
    assert (len(result.records), stub.most_open) == (50, 50)
    assert not [each.error for each in result.records if each.error]


def test_duration_ends_arrivals():
    with run_stub() as (stub, url):
        workload = Workload(rate=50, duration=0.4, prompt_tokens=(2, 2), new_tokens=(1, 1))
        run(url, workload)
        planned = list(itertools.takewhile(lambda time: time < 0.4, arrival_times(50, 0)))
        assert len(stub.bodies) == len(planned)


def test_arrivals_are_a_poisson_process():
    """Exponential gaps: mean and standard deviation are both 1 / rate."""
    times = list(itertools.islice(arrival_times(8.0, seed=1), 20_001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert list(itertools.islice(arrival_times(float("inf"), seed=1), 3)) == [0.0, 0.0, 0.0]


def test_seed_determines_requests():
    server = ServerInfo("m", None, tuple(range(50)))
    workload = Workload(streams=1, num_requests=1, prompt_tokens=(5, 20), new_tokens=(1, 9), seed=3)
    one, again = (list(itertools.islice(request_bodies(workload, server), 50)) for _ in range(2))
    assert one == again
    assert len({tuple(body["prompt"]) for body in one}) == 50
    assert {len(body["prompt"]) for body in one} <= set(range(5, 21))
    assert {body["max_tokens"] for body in one} == set(range(1, 10))


def test_unusable_servers():
    workload = Workload(streams=1, num_requests=1)
    with pytest.raises(ConfigError, match="127.0.0.1:1 cannot be reached: "):
        run("http://127.0.0.1:1", workload)
    with run_stub() as (_, url):
        with pytest.raises(ConfigError, match="no model 'x', but stub"):
            run(url, workload, model="x")
        too_long = Workload(streams=1, num_requests=1, new_tokens=(1000, 1000))
        with pytest.raises(ConfigError, match="1128 tokens exceed the 1000 of stub"):
            run(url, too_long)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x:y", "http://[:"])
def test_bad_addresses(url):
    with pytest.raises(ConfigError, match="--url takes an address"):
        Target.from_url(url)


def test_prefix_and_key_are_sent():
    data = Target.from_url("http://[::1]:7/api/v1/", "k").encode("POST", "/v1/x", {"a": 1})
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /api/v1/x HTTP/1.1\r\nHost: [::1]:7\r\nAuthorization: Bearer k")
    assert json.loads(body) == {"a": 1}


def test_plot_has_all_requests():
    pytest.importorskip("matplotlib")
    records = [record(index / 10, 0.1, 0.1, 5, 20) for index in range(10)]
    records.append(record(1.0, 0.1, 0.1, 5, 20, error="503"))
    result = LoadResult(records, started_at=0.0, finished_at=1.5)
    figure = load_figure(result, "title")
    figure.canvas.draw()
    labels = [text.get_text() for axes in figure.axes for text in axes.texts]
    legends = [
        text.get_text()
        for axes in figure.axes
        if axes.get_legend()
        for text in axes.get_legend().get_texts()
    ]
    assert any("p50 100" in text for text in legends + labels)
    assert "failed (1)" in legends
    edges = np.array([0.0, 0.55, 1.55])
    # Events come at 0.1, 0.2 … with 4 tokens each: those of the first two edges are counted.
    expected = [sum(0 <= time < 0.55 for each in records[:10] for time in each.event_times) * 4]
    assert tokens_by_time(records[:10], 0.0, edges)[0] == expected[0]
    assert tokens_by_time(records[:10], 0.0, edges).sum() == 200
    load_figure(LoadResult(), "").canvas.draw()  # nothing at all
