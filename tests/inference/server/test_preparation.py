"""Long requests that are parsed and tokenized delay nobody else."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
import pytest

from maxtext.inference.server import app, completions_writer
from tests.inference.server.local_server import run_server
from tests.support.server_client import MESSAGES, check_error, metric

LONG_TEXT = "w5 " * 1000
PATHS = ("/tokenize", "/v1/completions", "/v1/chat/completions")


def body(path, text):
    options = {"truncate_prompt_tokens": 5, "max_tokens": 1}
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": text}], **options}
    return {"prompt": text} | ({} if path == "/tokenize" else options)


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": [5] * 1000}, {"bad_words": ["w5"]}, {"metadata": "x" * 1000}]
)
def test_long_fields_of_a_short_prompt_are_checked_in_a_thread(
    llm, few_programs, monkeypatch, fields
):
    monkeypatch.setattr(app, "MAX_SHORT_BODY", 1000)
    with run_server(llm) as (model, url):
        threads, prepare = [], model.engine.prepare

        def record(request):
            threads.append(threading.current_thread().name)
            return prepare(request)

        monkeypatch.setattr(model.engine, "prepare", record)
        for more in ({}, fields):
            body = {"prompt": "w5", "max_tokens": 1, **more}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert response.status_code == 200
    in_loop, in_pool = threads
    assert "prepare" not in in_loop
    assert "prepare" in in_pool


def test_many_logprobs_are_written_in_a_thread(llm, few_programs, monkeypatch):
    """So that other requests need not wait; the response is the same."""
    monkeypatch.setattr(completions_writer, "MAX_SHORT_LOGPROBS", 12, raising=False)
    threads = []

    def record(formatter, logprobs, run=completions_writer.ChoiceFormatter.prompt_records):
        threads.append(threading.current_thread().name)
        return run(formatter, logprobs)

    monkeypatch.setattr(completions_writer.ChoiceFormatter, "prompt_records", record)
    options = {"max_tokens": 2, "prompt_logprobs": 1, "seed": 3, "ignore_eos": True}
    with run_server(llm) as (_, url):
        short, long = (
            httpx.post(
                f"{url}/v1/completions",
                json={"prompt": "w5 w6 w7", "n": n, **options},
                timeout=60,  # compiles
            )
            for n in (1, 3)
        )
    assert short.json()["choices"] == long.json()["choices"][:1]
    assert len(long.json()["choices"]) == 3
    in_loop, *in_threads = threads
    assert in_loop == "maxtext-http"
    assert len(in_threads) == 3
    assert "maxtext-http" not in in_threads


@pytest.mark.parametrize("echo", [False, True])
def test_many_logprobs_of_a_stream_are_written_in_a_thread(llm, few_programs, monkeypatch, echo):
    """The chunks add up to the whole response."""
    threads = []

    def record(formatter, *args, run=completions_writer.ChoiceFormatter.completion_logprobs):
        threads.append(threading.current_thread().name)
        return run(formatter, *args)

    monkeypatch.setattr(completions_writer.ChoiceFormatter, "completion_logprobs", record)
    # 2 for each of 4 tokens of the prompt or 3 of the completion
    monkeypatch.setattr(completions_writer, "MAX_SHORT_LOGPROBS", 7 if echo else 1)
    body = {"prompt": "w5 w6 w7", "max_tokens": 3, "logprobs": 1, "seed": 3, "ignore_eos": True}
    body |= {"echo": echo, "n": 2}
    with run_server(llm) as (_, url):
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        threads.clear()
        response = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
    lines = response.text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    for choice in whole:
        streamed = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in streamed) == choice["text"]
        for name, values in choice["logprobs"].items():
            parts = [chunk["logprobs"][name] for chunk in streamed if chunk["logprobs"]]
            assert list(itertools.chain(*parts)) == values
    assert threads[0].startswith("maxtext-logprobs")


def test_many_logprobs_are_not_written_for_a_client_that_left(llm, few_programs, monkeypatch):
    """Nor by a server that ends: only the choice in progress is finished."""
    monkeypatch.setattr(completions_writer, "MAX_SHORT_LOGPROBS", 1)
    has_left, has_ended, started = threading.Event(), threading.Event(), []

    def record(formatter, logprobs):
        started.append(formatter.index)
        assert has_left.wait(60)
        return []

    monkeypatch.setattr(completions_writer.ChoiceFormatter, "prompt_records", record)
    body = {"prompt": "w5 w6", "n": 8, "max_tokens": 1, "prompt_logprobs": 1}
    with run_server(llm) as (_, url):
        has_left.set()
        httpx.post(f"{url}/v1/completions", json=body, timeout=60)  # compiles
        started.clear()
        has_left.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=2)
        has_ended.wait(0.5)
        has_left.set()
        has_ended.wait(0.3)
    assert started == [0]


@pytest.mark.parametrize("path", PATHS)
def test_long_texts_delay_no_short_request(llm, few_programs, monkeypatch, path):
    """More of them than the threads of asyncio's pool, and one more than their queue takes."""
    monkeypatch.setattr(app, "MAX_SHORT_BODY", 1000)
    monkeypatch.setattr(app, "MAX_LONG_QUEUE", 40)
    num_long = 40 + app.NUM_LONG_THREADS
    may_go_on = threading.Event()
    with run_server(llm) as (model, url):
        names = ("encode_with_specials", "encode_prompt")
        for name, encode in [(name, getattr(model.tokenizer, name)) for name in names]:

            def blocking(text, encode=encode):
                assert len(text) < 100 or may_go_on.wait(60)
                return encode(text)

            monkeypatch.setattr(model.tokenizer, name, blocking)
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            ThreadPoolExecutor(num_long + 1) as threads,
        ):
            for _ in range(num_long):  # clients that leave give up their places
                with pytest.raises(httpx.TimeoutException):
                    http.post(path, json=body(path, LONG_TEXT), timeout=0.01)
            calls = [
                threads.submit(httpx.post, url + path, json=body(path, LONG_TEXT), timeout=60)
                for _ in range(num_long + 1)
            ]
            try:
                refused = next(as_completed(calls, timeout=60))
                check_error(refused.result(), 429, "preparation_queue_full")
                assert int(refused.result().headers["retry-after"]) >= 1
                assert http.get("/health").status_code == 200
                chat = {"messages": MESSAGES, "max_tokens": 1}
                assert http.post("/v1/chat/completions", json=chat).status_code == 200
                assert http.post("/tokenize", json={"prompt": "w5"}).json()["count"] == 2
            finally:
                may_go_on.set()
            statuses = [call.result().status_code for call in calls]
            num_refused = statuses.count(429)
            # Two threads may still work for clients that have left.
            assert 1 <= num_refused <= 3
            assert statuses.count(200) == len(calls) - num_refused
            name = "requests_rejected_total"
            assert metric(http, name, reason="preparation_queue_full") == num_refused
