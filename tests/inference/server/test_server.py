"""The server with its real clients. Greedy completions and log-probabilities are compared with
transformers.
"""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from maxtext.common.log import LOGGER
from maxtext.inference.server import events as events_module
from maxtext.inference.server.app import Endpoints, ServerOptions, build_app
from maxtext.inference.server.errors import NOT_FOUND
from tests.inference.conftest import WORDS
from tests.inference.server.local_server import KEY, run_server
from tests.support.server_client import (
    EOS,
    MESSAGES,
    check_error,
    greedy,
    log_softmax,
    metric,
    text_of,
    wait_until_idle,
)

PROMPT = "w5 w12 w31"
CHAT_IDS = [5, 12, 9]  # by the template of the fixture
LONG = {"prompt": "w5", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


def prompt_ids(text):
    """One token a word, after <s>."""
    return [0, *(int(word[1:]) for word in text.split())]


def post(http, path, **body):
    response = http.post(path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(http, path, **body):
    """The events of a stream, which ends with [DONE]."""
    with http.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as response:
        text = b"".join(response.iter_bytes()).decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_models(openai_client):
    assert [each.id for each in openai_client.models.list().data] == ["tiny", "alias"]
    model = openai_client.models.retrieve("alias").model_dump()
    assert (model["object"], model["max_model_len"]) == ("model", 128)


def test_completion_equals_transformers(openai_client, model):
    ids = prompt_ids(PROMPT)
    new, _ = greedy(model, ids, 10)
    result = openai_client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=10, temperature=0
    )
    (choice,) = result.choices
    assert choice.text.split() == text_of(new).split()
    assert choice.finish_reason == ("stop" if new[-1] == EOS else "length")
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(new))
    assert usage.total_tokens == len(ids) + len(new)


def test_choices_are_ordered_by_prompt_and_then_by_n(http, model):
    prompts = [prompt_ids("w5"), prompt_ids("w6 w7")]
    body = {"prompt": prompts, "n": 2, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    choices = post(http, "/v1/completions", **body)["choices"]
    expected = [greedy(model, ids, 5)[0] for ids in prompts]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    assert [each["token_ids"] for each in choices] == [row for row in expected for _ in range(2)]
    assert [each.get("prompt_token_ids") for each in choices] == [
        prompts[0],
        None,
        prompts[1],
        None,
    ]


def test_logprobs_and_echo_equal_transformers(http, model):
    ids = prompt_ids(PROMPT)
    rows = log_softmax(model, ids)
    expected = [float(rows[index - 1][ids[index]]) for index in range(1, len(ids))]
    new, new_logprobs = greedy(model, ids, 1)
    body = {"prompt": [ids], "logprobs": 2, "echo": True, "temperature": 0}
    for count in (1, 0):
        (choice,) = post(http, "/v1/completions", **body, max_tokens=count)["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        numbers = [*expected, *new_logprobs[:count]]
        assert logprobs["token_logprobs"][1:] == pytest.approx(numbers, abs=2e-3)
        assert logprobs["tokens"] == [WORDS[token] for token in [*ids, *new[:count]]]
        for number, top in zip(numbers, logprobs["top_logprobs"][1:], strict=True):
            assert 2 <= len(top) <= 3
            assert any(value == pytest.approx(number, abs=2e-3) for value in top.values())
        assert len(logprobs["text_offset"]) == len(ids) + count


def test_prompt_logprobs_equal_transformers(http, model):
    """In vLLM's format: by token id, with ranks; of a chat beside the choices."""
    body = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    (choice,) = post(http, "/v1/completions", prompt=PROMPT, **body)["choices"]
    chat = post(http, "/v1/chat/completions", messages=MESSAGES, **body)
    for records, ids in (
        (choice["prompt_logprobs"], prompt_ids(PROMPT)),
        (chat["prompt_logprobs"], CHAT_IDS),
    ):
        rows = log_softmax(model, ids)
        assert records[0] is None
        assert len(records) == len(ids)
        for token, record, row in zip(ids[1:], records[1:], rows, strict=False):
            likely = row.argsort(descending=True).tolist()
            assert set(record) == {str(each) for each in (*likely[:2], token)}
            for name, each in record.items():
                assert each["logprob"] == pytest.approx(float(row[int(name)]), abs=2e-3)
                assert each["rank"] == likely.index(int(name)) + 1
                assert each["decoded_token"] == WORDS[int(name)]
    for wrong in ({"stream": True}, {"prompt_logprobs": 21}):
        response = http.post("/v1/completions", json={"prompt": PROMPT, **body, **wrong})
        check_error(response, 400, param="prompt_logprobs")
    # A completion with `echo` has as many of the most likely tokens as `logprobs` says.
    body |= {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "prompt": PROMPT}
    (choice,) = post(http, "/v1/completions", **body)["choices"]
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert choice["logprobs"]["tokens"][:4] == [f"token_id:{each}" for each in prompt_ids(PROMPT)]
    assert len(choice["prompt_logprobs"]) == 4


def test_allowed_tokens_and_bad_words(http):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    allowed = {"allowed_token_ids": [7, 8], "return_token_ids": True}
    (choice,) = post(http, "/v1/completions", **body, **allowed)["choices"]
    assert set(choice["token_ids"]) <= {7, 8}
    words = {WORDS[token] for token in choice["token_ids"]}
    (choice,) = post(http, "/v1/completions", **body, **allowed, bad_words=sorted(words)[:1])[
        "choices"
    ]
    assert sorted(words)[0] not in choice["text"].split()


@pytest.mark.parametrize("n", [1, 2])
def test_stream_equals_whole_response(http, n):
    body = {"prompt": ["w5 w6", "w8"], "max_tokens": 9, "temperature": 0.9, "seed": 3, "n": n}
    body |= {"logprobs": 1, "echo": True}
    whole = post(http, "/v1/completions", **body)
    chunks = events(http, "/v1/completions", **body, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        for name, numbers in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][name]] == numbers


def test_seed_repeats_and_choices_differ(http):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "n": 3}
    texts = [
        [choice["text"] for choice in post(http, "/v1/completions", **body, seed=seed)["choices"]]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 1


def test_stop_text(http, model):
    new = greedy(model, prompt_ids(PROMPT), 8)[0]
    stop = WORDS[new[4]]
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stop": [stop]}
    (choice,) = post(http, "/v1/completions", **body)["choices"]
    before = new[: new.index(new[4])]
    assert choice["text"].split() == text_of(before).split()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    text = "".join(
        part["text"]
        for chunk in events(http, "/v1/completions", **body)
        for part in chunk["choices"]
    )
    assert text == choice["text"]


def test_chat_equals_transformers(openai_client, model):
    new, _ = greedy(model, CHAT_IDS, 8)
    for limit in ("max_tokens", "max_completion_tokens"):
        result = openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, **{limit: 8}
        )
        assert result.choices[0].message.role == "assistant"
        assert result.choices[0].message.content.split() == text_of(new).split()
        assert result.usage.prompt_tokens == len(CHAT_IDS)


def test_chat_stream(openai_client, http):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = post(http, "/v1/chat/completions", **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(http, "/v1/chat/completions", **body)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {}
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text == whole["message"]["content"]
    content = [
        token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]
    ]
    assert content == whole["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    stop = text.split()[4]
    arguments = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "stop": stop}
    with openai_client.chat.completions.stream(**arguments) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(stop)]


def test_held_text_delays_its_token_ids(http, model):
    """A stop string may begin with what is held back: no chunk between the first and the last is
    empty, and the last has the tokens without text.
    """
    new = greedy(model, CHAT_IDS, 8)[0]
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    body |= {"stop": [f"{WORDS[new[3]]} never"], "logprobs": True}
    chunks = [chunk["choices"][0] for chunk in events(http, "/v1/chat/completions", **body)]
    assert chunks[0]["prompt_token_ids"] == CHAT_IDS
    assert all(chunk["delta"]["content"] for chunk in chunks[1:-1])
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == new
    for chunk in chunks:
        entries = chunk["logprobs"]["content"] if chunk["logprobs"] else []
        assert len(entries) == len(chunk.get("token_ids", ()))


def test_template_variables_and_errors(http, model):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "return_token_ids": True}
    variables = {"thinking": True}
    (choice,) = post(http, "/v1/chat/completions", **body, chat_template_kwargs=variables)[
        "choices"
    ]
    assert choice["prompt_token_ids"] == [5, 12, 7, 9]
    assert choice["token_ids"] == greedy(model, [5, 12, 7, 9], 3)[0]
    robots = [{"role": "robot", "content": "w5"}]
    response = http.post("/v1/chat/completions", json={"messages": robots})
    message = check_error(response, 400, param="messages")["message"]
    assert "no robots" in message
    assert "{'role'" not in message  # no objects of Python
    for name in ("bos_token", "sep_token", "self"):  # the tokenizer has no sep_token
        wrong = {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}}
        response = http.post("/v1/chat/completions", json=wrong)
        check_error(response, 400, param="chat_template_kwargs")


def test_tokenize_and_detokenize(http):
    result = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert result["tokens"] == prompt_ids(PROMPT)
    assert result["token_strs"] == ["<s>", *PROMPT.split()]
    assert (result["count"], result["max_model_len"]) == (4, 128)
    assert post(http, "/tokenize", messages=MESSAGES)["tokens"] == CHAT_IDS
    special = post(http, "/tokenize", messages=MESSAGES, add_special_tokens=True)["tokens"]
    assert special == [prompt_ids(PROMPT)[0], *CHAT_IDS]
    assert post(http, "/detokenize", tokens=[5, 12])["prompt"] == "w5 w12"
    for tokens in ("x", [61], [-1], [2**70]):
        check_error(http.post("/detokenize", json={"tokens": tokens}), 400, param="tokens")
    tools = {"messages": MESSAGES, "tools": [1]}
    check_error(http.post("/tokenize", json=tools), 400, param="tools")
    for name, value, code in (
        ("chat_template", "x", "unsupported_parameter"),
        ("truncate_prompt_tokens", 2, "unsupported_parameter"),
        ("prompt", PROMPT, None),
    ):
        wrong = {"messages": MESSAGES, name: value}
        check_error(http.post("/tokenize", json=wrong), 400, code, name)
    for path, body in (("/tokenize", {"prompt": "w5"}), ("/detokenize", {"tokens": [5]})):
        response = http.post(path, json={**body, "user": "u", "chat_id": "x"})
        assert response.headers["x-ignored-fields"] == "chat_id"
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


def test_errors_have_the_envelope_of_openai(http, openai_client):
    import openai

    completions = "/v1/completions"
    unknown = http.post(completions, json={"model": "gpt-9", "prompt": "w5"})
    assert check_error(unknown, 404, "model_not_found", "model")["type"] == NOT_FOUND
    check_error(
        http.post(completions, json={"model": ["tiny"], "prompt": "w5"}), 400, None, "model"
    )
    for path in ("/v1/nothing", "/v1/completions/", "/health/"):
        check_error(http.get(path), 404)
    check_error(http.get(completions), 405)
    check_error(http.post(completions, content=b"{"), 400)
    check_error(http.post(completions, json={"prompt": [10**9]}), 400, param="prompt")
    check_error(
        http.post(completions, json={"prompt": "w5", "logit_bias": {"999": 1}}),
        400,
        param="logit_bias",
    )
    check_error(http.post(completions, content=b" " * 100_001), 413)
    check_error(http.post(completions, content=b"x", headers={"Content-Encoding": "gzip"}), 415)
    for path in ("/v1/embeddings", "/v1/messages"):
        check_error(http.post(path, json={}), 404)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        error = check_error(http.post(path, json={"lora_name": "x", "lora_path": "y"}), 403)
        assert error["type"] == "permission_error"
    too_long = {"prompt": [5] * 125, "max_tokens": 9}
    for stream in (False, True):
        response = http.post(completions, json={**too_long, "stream": stream})
        check_error(response, 400, "context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError):
        openai_client.completions.create(model="tiny", prompt="w5", temperature=-1)


def test_fields_without_meaning_are_named(http):
    body = {"prompt": "w5", "max_tokens": 1, "chat_id": "x", "user": "u", "seed": None}
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id"})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "chat_id"
    assert response.headers["x-request-id"] == "my-id"
    body["request_id"] = "own-id"
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id"})
    assert response.headers["x-request-id"] == "own-id"
    for wrong in ("", "a b", "ü", 3):
        check_error(
            http.post("/v1/completions", json={**body, "request_id": wrong}),
            400,
            param="request_id",
        )


def test_head_requests(http):
    """Load balancers check servers by HEAD; the answer has the head of GET alone."""
    for path in ("/health", "/v1/models", "/"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")
        assert int(response.headers["content-length"]) == len(http.get(path).content)
    check_error(http.get("/v1/completions"), 405)


def test_health_tells_what_is_compiled(server, http, monkeypatch):
    """Meanwhile it answers, and the server is ready."""
    programs = server[0].llm.programs
    has_begun, may_end = threading.Event(), threading.Event()
    jit = programs.prefill.jit

    def slow_jit(function, **options):
        program = jit(function, **options)

        def run(*args):
            has_begun.set()
            assert may_end.wait(60)
            return program(*args)

        run.clear_cache, run._cache_size = program.clear_cache, program._cache_size
        return run

    monkeypatch.setattr(programs.prefill, "jit", slow_jit)
    number = programs.compilation.num_compiled
    body = {"prompt": "w5", "max_tokens": 1, "logprobs": 7}
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(http.post, "/v1/completions", json=body)
            assert has_begun.wait(60)
            response = http.get("/health")
            assert response.status_code == 200
            compiling = response.json()["compiling"]
        finally:
            may_end.set()
        assert answer.result().status_code == 200
    assert compiling["program"].startswith("prefill of ")
    assert compiling["num_compiled"] == number
    assert compiling["seconds"] >= 0
    assert http.get("/health").json() == {}


def test_every_route_needs_a_key(server):
    """Except for five; other spellings of these are not open, either."""
    model, url = server
    open_paths = {"/", "/health", "/ping", "/version", "/metrics"}
    routes = Endpoints(model, ServerOptions(), SimpleNamespace()).routes()
    closed = [(method, path) for method, path, _ in routes if path not in open_paths]
    assert {"/v1/responses", "/v1/load_lora_adapter"} < {path for _, path in closed}
    tricks = ["/health/../v1/models", "/health%2f..%2fv1/models", "//v1/models", "/v1/models/"]
    tricks += ["/%2e/v1/models", "/v1/models?x=/health", "/health/v1/models", "/v1/models%00"]
    address = httpx.URL(url)
    for method, path in [*closed, *(("GET", path) for path in tricks)]:
        with socket.create_connection((address.host, address.port), timeout=10) as connection:
            path = path.replace("{name:path}", "tiny")
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 401 "), path


def test_keys(server):
    with httpx.Client(base_url=server[1], timeout=60) as bare:
        body = {"prompt": "w5", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            for path in ("/v1/completions", "/tokenize", "/v1/nothing"):
                response = bare.post(path, json=body, headers=headers)
                check_error(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"x-api-key": KEY}, {"Authorization": "bearer other"}):
            assert bare.post("/v1/completions", json=body, headers=headers).status_code == 200
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert bare.get(path).status_code == 200


def test_cors(server):
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    with httpx.Client(base_url=server[1], timeout=60) as bare:
        for origin, allowed in (("http://page.test", True), ("http://evil.test", False)):
            response = bare.options("/v1/completions", headers={"Origin": origin, **ask})
            assert (response.headers.get("access-control-allow-origin") == origin) == allowed
            if not allowed:
                check_error(response, 400)
        response = bare.get("/health", headers={"Origin": "http://page.test"})
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()


def test_foreign_pages_are_refused_with_a_key(http):
    body = {"prompt": "w5", "max_tokens": 1}
    for headers, code in (
        ({"Origin": "http://evil.test"}, "origin_not_allowed"),
        ({"Origin": "null"}, "origin_not_allowed"),
        ({"Origin": "http://evil.test", "Host": "evil.test"}, "host_not_allowed"),
    ):
        check_error(http.post("/v1/completions", json=body, headers=headers), 403, code)
    own = str(http.base_url).rstrip("/")
    for origin in (own, "http://page.test"):
        headers = {"Origin": origin}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_metrics_count_exactly(http):
    wait_until_idle(http)
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [metric(http, name) for name in names]
    num_length = metric(http, "request_success_total", finished_reason="length")
    num_computed = metric(http, "iteration_tokens_total_sum")
    usage = post(http, "/v1/completions", **LONG | {"max_tokens": 13})["usage"]
    wait_until_idle(http)
    assert [metric(http, name) - start for name, start in zip(names, before, strict=True)] == [
        usage["prompt_tokens"],
        13,
    ]
    assert metric(http, "request_success_total", finished_reason="length") == num_length + 1
    assert metric(http, "http_requests_total", path="/v1/completions", status="200") > 0
    assert metric(http, "time_to_first_token_seconds_count") > 0
    # Prompt and completion, over all steps.
    total = usage["total_tokens"]
    assert metric(http, "iteration_tokens_total_sum") - num_computed == total
    assert metric(http, "cache_config_info", max_model_len="128", max_num_seqs="8") == 1
    assert metric(http, "lora_requests_info", running_lora_adapters="") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_slots(http, server, stream):
    wait_until_idle(http)
    num_aborted = metric(http, "request_success_total", finished_reason="abort")
    num_tokens = metric(http, "generation_tokens_total")
    body = json.dumps({**LONG, "n": 128, "stream": stream}).encode()
    url = httpx.URL(server[1])
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            connection.recv(100)
        else:
            time.sleep(0.1)
    wait_until_idle(http)
    assert metric(http, "generation_tokens_total") - num_tokens < 128 * 120
    assert metric(http, "request_success_total", finished_reason="abort") > num_aborted


def post_to_app(model, monkeypatch, body, count=1, **options):
    """Responses of another application for the same model."""
    monkeypatch.setattr(model.engine, "on_step", None)  # it belongs to the metrics of the server
    app = build_app(model, ServerOptions(**options))

    async def send():
        transport = httpx.ASGITransport(app)
        headers = {"x-api-key": KEY}
        async with httpx.AsyncClient(transport=transport, headers=headers) as client:
            url = "http://localhost/v1/chat/completions"
            return [await client.post(url, json=body) for _ in range(count)]

    return asyncio.run(send())


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_are_logged_only_if_wanted(server, monkeypatch, caplog, log_prompts):
    secret = "w5 w12 w33"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 1, "chat_id": "w50"}
    caplog.set_level("INFO", logger=LOGGER.name)
    options = {"log_requests": True, "log_prompts": log_prompts, "api_keys": [KEY]}
    for response in post_to_app(server[0], monkeypatch, body, count=2, **options):
        assert response.status_code == 200
    assert (secret in caplog.text) == log_prompts
    assert "POST /v1/chat/completions 200" in caplog.text
    assert caplog.text.count("ignoring unknown fields of requests: chat_id") == 1
    assert KEY not in caplog.text
    assert "w50" not in caplog.text


def test_the_log_shows_the_paths_of_refused_requests(server, monkeypatch, caplog):
    """Without a key, and to an unknown route; no path begins a line of its own."""
    caplog.set_level("INFO", logger=LOGGER.name)
    options = {"log_requests": True, "api_keys": ["other"]}
    (response,) = post_to_app(server[0], monkeypatch, {}, **options)
    assert response.status_code == 401
    assert "POST /v1/chat/completions 401" in caplog.text
    app = build_app(server[0], ServerOptions(log_requests=True))

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v2/x%0AINFO%20forged/" + "y" * 500)

    assert asyncio.run(send()).status_code == 404
    line = caplog.records[-1].getMessage()
    assert " GET /v2/x%0AINFO%20forged/yyy" in line
    assert line.endswith("y 404")
    assert len(line) < 300


def test_server_without_tools(server, monkeypatch):
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (response,) = post_to_app(server[0], monkeypatch, body, allows_tools=False)
    check_error(response, 400, "unsupported_parameter", "tools")


@pytest.mark.slow
def test_full_queue_and_draining(llm, few_programs, monkeypatch):
    """One sequence runs and one waits: the third is refused. A draining server refuses new
    requests, finishes the running one and drops the waiting one.
    """
    monkeypatch.setattr(events_module, "FIRST_EVENT_SECONDS", 0.05)
    with run_server(llm, slots=1, max_queue=1) as (model, url):
        step = model.engine.step

        def slow_step():
            time.sleep(0.1)
            step()

        monkeypatch.setattr(model.engine, "step", slow_step)
        body = {**LONG, "max_tokens": 60, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as first,
            client.stream("POST", "/v1/completions", json=body) as second,
        ):
            third = client.post("/v1/completions", json=body)
            check_error(third, 429, "queue_full")
            assert int(third.headers["retry-after"]) >= 1
            assert model.engine.drain(30)
            check_error(client.get("/health"), 503, "draining")
            for refused in (body, {"prompt": []}):
                check_error(client.post("/v1/completions", json=refused), 503, "draining")
            assert first.read().endswith(b"data: [DONE]\n\n")
            (event,) = second.read().decode().strip().split("\n\n")
            assert json.loads(event.removeprefix("data: "))["error"]["code"] == "draining"
