"""Reasoning and calls of a model whose text is forced by a regex, in chats and in /v1/responses."""

import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from maxtext import LLM
from tests.inference import few_shapes
from tests.inference.server.local_server import run_server
from tests.support.offered_tools import TOOLS
from tests.support.schemas import SCHEMAS, SIZES

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        few_shapes.patch(patch)
        llm = LLM.load("qwen3-0.6b", **SIZES)
        with run_server(llm, length=256, parsers=("hermes", "think")) as served:
            yield served


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server[1], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=60)


def forced(text):
    """Fields of a request whose completion is this text."""
    escaped = "".join(f"\\{letter}" if letter in "{}[]().*+?|/\\" else letter for letter in text)
    return {"structured_outputs": {"regex": escaped}, "max_tokens": 200, "seed": 1}


def chat(http, text, **body):
    response = http.post(CHAT, json={"messages": MESSAGES, **forced(text), **body})
    assert response.status_code == 200, response.text
    return response.json()


def chat_deltas(http, text, **body):
    ask = {"messages": MESSAGES, "stream": True, **forced(text), **body}
    blocks = http.post(CHAT, json=ask).text.split("\n\n")
    chunks = [json.loads(block[6:]) for block in blocks if block.startswith("data: {")]
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_reasoning_of_chats(http):
    text = "<think>\nHm, stop.\n</think>\n\nYes, stop."
    body = {"stop": ["stop"]}
    result = chat(http, text, **body)
    (choice,) = result["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, stop."
    # Stop strings act in the answer alone.
    assert (message["content"], choice["stop_reason"]) == ("Yes, ", "stop")
    # One token a byte, and the newlines belong to the reasoning.
    details = result["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("\nHm, stop.\n")}
    deltas = chat_deltas(http, text, **body)
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


def test_answer_without_reasoning(http):
    (choice,) = chat(http, "Yes.")["choices"]
    assert choice["message"]["content"] == "Yes."
    assert "reasoning" not in choice["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "num_calls"), [(True, 2), (False, 1)])
def test_calls_of_chats(http, parallel, num_calls):
    body = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": parallel}
    (choice,) = chat(http, f"<think>a</think>{CALL}{CALL}", **body)["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message["reasoning"] == "a"
    assert len(message["tool_calls"]) == num_calls
    deltas = chat_deltas(http, f"<think>a</think>{CALL}{CALL}", **body)
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    for index in range(num_calls):
        first, *others = [part for part in parts if part["index"] == index]
        assert (first["type"], first["function"]) == ("function", {"name": "f", "arguments": ""})
        assert not any("id" in part for part in others)
        arguments = [part["function"]["arguments"] for part in others]
        assert "".join(arguments) == '{"x": 1}'
    assert len({part["index"] for part in parts}) == num_calls


def test_arguments_come_while_the_model_writes_them(http):
    """A token of this model is a byte, and a program decodes several."""
    text = "x" * 60
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": "{text}"}}}}</tool_call>'
    tools = [{"type": "function", "function": FUNCTION}]
    deltas = chat_deltas(http, call, tools=tools)
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    arguments = [part["function"]["arguments"] for part in parts]
    assert json.loads("".join(arguments)) == {"x": text}
    assert len([part for part in arguments if part]) >= 4


@pytest.mark.slow
def test_required_calls_of_a_random_model_validate(http):
    jsonschema = pytest.importorskip("jsonschema")
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "set_tags"}}
    for seed, choice in enumerate(("required", "required", named)):
        ask = {**body, "tool_choice": choice, "seed": seed}
        (result,) = http.post(CHAT, json=ask).json()["choices"]
        assert (result["finish_reason"], result["message"]["content"]) == ("tool_calls", None)
        (call,) = result["message"]["tool_calls"]
        index = ("add_person", "set_tags").index(call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[index])
        response = http.post(CHAT, json={**ask, "stream": True})
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert [part["index"] for part in parts] == [0] * len(parts)
        assert parts[0]["type"] == "function"
        assert parts[0]["function"]["name"] == call["function"]["name"]
        assert not any("id" in part for part in parts[1:])
        text = "".join(part["function"]["arguments"] for part in parts)
        assert text == call["function"]["arguments"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({"json": {"$ref": "#"}}, "structured_outputs"),
        ({"grammar": 'start: start "a"'}, "structured_outputs"),
        ({"regex": "a?" * 500 + "a" * 500}, None),  # it exceeds a limit while it is followed
    ],
)
def test_grammar_that_cannot_be_followed_is_an_error_of_the_client(http, constraint, param, stream):
    body = {"messages": MESSAGES, "structured_outputs": constraint, "stream": stream}
    response = http.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "structured_outputs": {"regex": "x"}}),
        ("/v1/completions", {"prompt": [5], "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": MESSAGES, "structured_outputs": {"regex": "x"}}),
        # The field of another endpoint does not make it a short prompt.
        (CHAT, {"messages": MESSAGES, "prompt": "", "tools": TOOLS, "tool_choice": "required"}),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_event_loop_runs_while_grammars_are_compiled(server, http, monkeypatch, path, body):
    """Chats are prepared meanwhile, too: grammars do not take the threads that they need."""
    compiler = server[0].llm.grammars
    num_waiting, may_end = threading.Semaphore(0), threading.Event()

    def wait(constraint):
        num_waiting.release()
        assert may_end.wait(60)
        raise ValueError("no grammar")

    monkeypatch.setattr(compiler, "compile", wait)
    monkeypatch.setattr(compiler, "compiled", OrderedDict())
    with ThreadPoolExecutor(12) as pool:
        try:
            slow = [pool.submit(http.post, path, json=body) for _ in range(12)]
            assert num_waiting.acquire(timeout=60)
            assert http.get("/health", timeout=20).status_code == 200
            chat = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}, timeout=20)
            assert chat.status_code == 200
        finally:
            may_end.set()
        for response in slow:
            error = response.result().json()["error"]
            assert error["message"].endswith("cannot be compiled: no grammar")
            assert error["param"] in {*body, "tools"}


def respond(client, text, **fields):
    fields = {"model": "tiny", "input": "Hi", "extra_body": forced(text), **fields}
    fields["extra_body"] = {
        key: value for key, value in fields["extra_body"].items() if key != "max_tokens"
    }
    return client.responses.create(**fields)


@pytest.mark.slow
def test_items_of_a_response(openai_client):
    tools = [{"type": "function", "strict": False, **FUNCTION}, {"type": "web_search"}]
    result = respond(openai_client, f"<think>a</think>So:{CALL}", tools=tools)
    reasoning, message, call = result.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "a")
    assert (message.type, message.status, message.content[0].text) == (
        "message",
        "completed",
        "So:",
    )
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x": 1}')
    assert (result.status, result.output_text) == ("completed", "So:")
    assert result.usage.output_tokens_details.reasoning_tokens == 1
    assert result.usage.total_tokens == result.usage.input_tokens + result.usage.output_tokens


def test_events_of_a_response(openai_client):
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    text = f"<think>a</think>So:{CALL}"
    events = list(respond(openai_client, text, tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    merged = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    item = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    assert merged == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*item, "output_text.delta", "output_text.done", *end),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert events[-1].response.output_text == "So:"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [each.id for each in done] == [each.id for each in events[-1].response.output]


def test_stream_helper_of_the_client(openai_client):
    extra = {key: value for key, value in forced("Yes.").items() if key != "max_tokens"}
    with openai_client.responses.stream(model="tiny", input="Hi", extra_body=extra) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text == final.output_text == "Yes."


def test_response_that_is_cut(openai_client):
    result = respond(openai_client, "Yes.", max_output_tokens=2)
    assert (result.status, result.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (result.output_text, result.output[0].status) == ("Ye", "incomplete")


def test_response_repeats_the_defaults_of_the_model(server, http, monkeypatch):
    monkeypatch.setattr(server[0], "sampling_defaults", {"temperature": 0.6, "top_p": 0.9})
    for body, expected in (({}, (0.6, 0.9)), ({"temperature": 0}, (0, 0.9))):
        body = {"input": "Hi", "max_output_tokens": 1, **body}
        response = http.post(RESPONSES, json=body).json()
        assert (response["temperature"], response["top_p"]) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("input", []),
        ("input", [{"type": "item_reference"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("max_output_tokens", 0),
        ("text", {"format": {"type": "yaml"}}),
        ("text", {"format": {"type": "json_schema", "schema": 3}}),
        ("text", {"format": {"type": "json_schema", "schema": {"type": "sometimes"}}}),
        ("metadata", "x"),
        ("request_id", "a b"),
        ("tools", {}),
        ("tool_choice", {"type": "web_search"}),
        ("include", "reasoning.encrypted_content"),
        ("truncation", "auto"),
        ("stream_options", []),
        ("temperature", -1),
    ],
)
def test_wrong_fields_of_responses(http, field, value):
    response = http.post(RESPONSES, json={"input": "Hi", field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    for name in ("max_completion_tokens", "response_format", "reasoning_effort"):  # of chats
        assert name not in error["message"]
