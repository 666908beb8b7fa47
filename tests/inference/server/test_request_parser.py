"""Bodies of requests become SamplingParams, or an error that names the field."""

from types import SimpleNamespace

import pytest

from maxtext.inference.server.bodies import parse_body, parse_messages
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.request_parser import RequestParser
from maxtext.inference.streams import EngineError
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import ChatTemplate

MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture
def parser():
    """A model whose tokens are characters, of 40 tokens."""
    model = SimpleNamespace(
        max_length=40,
        engine=SimpleNamespace(capacity=6),
        longest_token=8,
        sampling_defaults={"top_p": 0.9},
        encode=lambda text: list(text.encode()),
        # A character \x01 for each variable of the template.
        render_chat=lambda messages, variables, *how: (
            "".join(message["content"] for message in messages) + "\x01" * len(variables)
        ),
        tokenizer=SimpleNamespace(
            decode=lambda ids: bytes(ids).decode(),
            encode_with_specials=lambda text: list(text.encode()),
        ),
        special_ids={},
        template_defaults={},
        tool_parser="none",
        reasoning_parser="none",
        find=lambda name: ("tiny", ""),
    )
    return RequestParser(model)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_body_that_is_no_standard_json_object_is_refused(data, reason):
    with pytest.raises(RequestError, match=reason):
        parse_body(data)


def test_null_is_absent():
    assert parse_body(b'{"a": null, "b": 0}') == {"b": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "9"),
        ("max_completion_tokens", 0),
        ("stop", [1]),
        ("seed", "x"),
        ("seed", 2**70),
        ("logit_bias", {"x": 1}),
        ("presence_penalty", 9),
        ("repetition_penalty", 0),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "yaml"}),
        ("best_of", 5),
        ("best_of", True),
        ("logprobs", 21),
        ("prompt", []),
        ("prompt", [[1], "x"]),
        ("prompt", {"a": 1}),
        ("suffix", "x"),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("prompt", ["x"] * 7),
        ("echo", 1),
        ("cache_salt", 1),
        ("truncate_prompt_tokens", 0),
        ("skip_special_tokens", "no"),
        ("logit_bias", {"1": True}),
        ("stop", ["a"] * 65),
        ("stop", "x" * 1025),
        ("top_k", 1.5),
        ("seed", True),
    ],
)
def test_wrong_value_names_its_field(parser, name, value):
    with pytest.raises(RequestError) as caught:
        parser.completion({"prompt": "x", name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "options", ["x", [], {"include_usage": "yes"}, {"continuous_usage_stats": 1}]
)
def test_wrong_stream_options(parser, options):
    with pytest.raises(RequestError) as caught:
        parser.completion({"prompt": "x", "stream": True, "stream_options": options})
    assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", [{"role": "user", "content": None}]),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"tools": []}),
    ],
)
def test_wrong_field_of_chat(parser, field, value):
    with pytest.raises(RequestError) as caught:
        parser.chat({"messages": MESSAGES, field: value})
    assert caught.value.param == field


def test_defaults(parser):
    """Those of OpenAI's API, below those of the model, below the request's own."""
    (request,) = parser.completion({"prompt": "abc"}).requests
    assert request.prompt == [97, 98, 99]
    assert (request.params.max_new_tokens, request.params.temperature) == (16, 1.0)
    assert request.params.top_p == 0.9
    (request,) = parser.completion({"prompt": "abc", "top_p": 0.5}).requests
    assert request.params.top_p == 0.5
    (request,) = parser.chat({"messages": MESSAGES}).requests
    assert request.params.max_new_tokens == 38  # what is left of 40


def test_requests_without_seed_differ(parser):
    seeds = {parser.completion({"prompt": "a"}).requests[0].params.seed for _ in range(4)}
    assert len(seeds) == 4


def test_prompts_of_one_request_have_seeds_of_their_own(parser):
    first, second = parser.completion({"prompt": ["a", "a"], "seed": 7}).requests
    assert first.params.seed == 7 != second.params.seed


def test_parts_of_text_are_joined(parser):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = parser.chat({"messages": [{"role": "user", "content": parts}]}).requests
    assert request.prompt == [97, 98]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_see_reasoning_under_all_names(name):
    (message,) = parse_messages({"messages": [{"role": "assistant", "content": "a", name: "Hm"}]})
    assert {message[each] for each in ("reasoning", "reasoning_content", "thinking")} == {"Hm"}


def test_too_long_names_both_numbers(parser):
    with pytest.raises(RequestError, match=r"40 tokens.* 35 tokens.* 6") as caught:
        parser.completion({"prompt": "x" * 35, "max_tokens": 6})
    assert caught.value.code == "context_length_exceeded"
    body = {"prompt": "x" * 35, "max_tokens": 6, "truncate_prompt_tokens": 3}
    assert parser.completion(body).requests[0].prompt == [120] * 3


def test_long_text_is_refused_without_its_tokens(parser):
    """Tokens of 8 characters at most: 321 characters are 41 tokens or more."""

    def fail(text):
        raise AssertionError("it was tokenized")

    parser.model.encode = parser.model.tokenizer.encode_with_specials = fail
    text = "x" * 321
    for parse, body in (
        (parser.completion, {"prompt": [text]}),
        (parser.chat, {"messages": [{"role": "user", "content": text}]}),
    ):
        with pytest.raises(RequestError, match="40 tokens.* at least 41 tokens") as caught:
            parse(body)
        assert caught.value.code == "context_length_exceeded"
    for longest, size in ((8, 320), (None, 321)):
        parser.model.longest_token = longest
        with pytest.raises(AssertionError, match="tokenized"):
            parser.completion({"prompt": "x" * size})


def test_default_of_max_tokens(parser):
    """16 tokens, or what the maximum length leaves; 40 tokens leave none."""
    for size, count in ((10, 16), (35, 5)):
        (request,) = parser.completion({"prompt": "x" * size}).requests
        assert request.params.max_new_tokens == count
    with pytest.raises(RequestError, match="40 tokens") as caught:
        parser.completion({"prompt": "x" * 40})
    assert caught.value.code == "context_length_exceeded"


def test_echo_is_the_truncated_prompt(parser):
    body = {"prompt": ["abcdef", "gh"], "echo": True, "truncate_prompt_tokens": 3}
    assert parser.completion(body).echoes == ("def", "gh")


def test_reasoning_effort_none_disables_thinking(parser):
    (request,) = parser.chat({"messages": MESSAGES, "reasoning_effort": "none"}).requests
    assert request.prompt == [97, 98, 1, 1]  # two variables of the template


def test_unknown_names(parser):
    assert parser.completion({"prompt": "a", "chat_id": "x"}).ignored_fields == ("chat_id",)
    strict = RequestParser(parser.model, strict_fields=True)
    with pytest.raises(RequestError, match="chat_id"):
        strict.completion({"prompt": "a", "chat_id": "x"})


@pytest.mark.parametrize(
    ("suffix", "role"), [("", "system"), ("{% if role == 'developer' %}{% endif %}", "developer")]
)
def test_template_without_developers_gets_a_system_message(suffix, role):
    template = ChatTemplate("{% for m in messages %}{{ m.role }} {% endfor %}" + suffix, "a test")
    model = ServedModel(None, None, None, ["tiny"], chat_template=template)
    messages = [{"role": name, "content": "x"} for name in ("developer", "user")]
    assert model.render_chat(messages, {}) == f"{role} user "


def test_template_does_not_see_content_that_is_null():
    """transformers drops null fields; a template would write None."""
    template = ChatTemplate("{% for m in messages %}<{{ m['content'] }}>{% endfor %}", "a test")
    model = ServedModel(None, None, None, ["tiny"], chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert model.render_chat(parse_messages({"messages": messages}), {}) == "<>"


def test_neutral_values_of_unsupported_fields(parser):
    neutral = {"modalities": ["text"], "suffix": "", "priority": 0, "use_beam_search": False}
    assert parser.completion({"prompt": "x", **neutral}).ignored_fields == ()


def test_errors_become_statuses(caplog):
    full = ApiError.from_exception(EngineError("full", "queue_full", retry_after=2.4), "id1")
    assert (full.status, full.code, full.headers) == (429, "queue_full", {"Retry-After": "2"})
    wrong = ApiError.from_exception(RequestError("no", "max_new_tokens"), "id1")
    assert (wrong.status, wrong.param) == (400, "max_tokens")
    fault = ApiError.from_exception(ZeroDivisionError("secret"), "id1")
    assert (fault.status, fault.code) == (500, "internal_error")
    assert "secret" not in str(fault)
    assert "id1" in str(fault)
