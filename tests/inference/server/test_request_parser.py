"""Bodies of requests become SamplingParams, or an error that names the field."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxtext.cli.batch import BatchLine
from maxtext.inference.errors import EngineError
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.messages import Message
from maxtext.inference.server.model import ServedModel
from maxtext.inference.server.protocol import (
    INERT_FIELDS,
    UNSUPPORTED_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonBody,
    ResponsesRequest,
    TokenizeRequest,
)
from maxtext.inference.server.request_parser import RequestParser
from maxtext.inference.validation import RequestError, shorten
from maxtext.tokenizers import ChatTemplate

MESSAGES = [{"role": "user", "content": "ab"}]


class BodyParser(RequestParser):
    """Parses objects of JSON."""

    def completion(self, body):
        return super().completion(JsonBody(body))

    def chat(self, body):
        return super().chat(JsonBody(body))


def parse_body(data):
    return JsonBody.from_bytes(data).fields


def parse_messages(body):
    return JsonBody(body).parse(ChatRequest).messages


def check_names(body, kind):
    return JsonBody(body).check_names(kind)


@pytest.fixture
def parser():
    """A model whose tokens are characters, of 40 tokens."""
    model = SimpleNamespace(
        max_length=40,
        engine=SimpleNamespace(capacity=6),
        longest_token=8,
        sampling_defaults={"top_p": 0.9},
        # The id 1 is that of the beginning of a sequence.
        encode=lambda text, specials=True: [1] * specials + list(text.encode()),
        # A character \x01 for each variable of the template.
        render_chat=lambda messages, variables, *how: (
            "".join(message.content for message in messages) + "\x01" * len(variables)
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
    return BodyParser(model)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"a": "b', "unterminated string starting at character 6"),
        (b"[]", "object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "more than 128 levels deep"),
        (b'{"a": ' + b'[{"b":' * 64 + b"0" + b"}]" * 64 + b"}", "nested more than 128 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": {"b": 1, "b": 1}}', "twice"),
        (b'{"a": [' + b"{}," * 100_000 + b"{}]}", "more than 100000 lists and objects"),
        (b"{" + b",".join(b'"%d": 0' % n for n in range(1001)) + b"}", "1001 fields"),
    ],
)
def test_body_that_is_no_standard_json_object_is_refused(data, reason):
    with pytest.raises(RequestError, match=reason):
        parse_body(data)


LONG_LIST = [0] * 40_000  # 80 kB


@pytest.mark.parametrize(
    "value",
    [
        '[{"\\\\" [' * 30_000,  # brackets, quotes and backslashes
        ["[" * 99_990, '"', "[" * 100],
        json.loads("[" * 127 + "]" * 127),
        [[]] * 99_990,
        {"\\": "{" * 200_000},
        "\U0001f98a\\ud83e",
        [*LONG_LIST, -1, 10**30, 1.5, True],
    ],
)
def test_body_equals_its_json(value):
    for ensure_ascii in (False, True):
        data = json.dumps({"a": value}, ensure_ascii=ensure_ascii).encode()
        assert parse_body(data) == {"a": value}


@pytest.mark.parametrize(
    ("value", "reason"),
    [(b"1" * 5000, "too many digits"), (b'{"b": ["\\udd8a"]}', "surrogate"), (b"-1e999", "large")],
)
def test_long_body_is_read_as_strictly(value, reason):
    data = b'{"a": %s, "b": %s}' % (json.dumps(LONG_LIST).encode(), value)
    with pytest.raises(RequestError, match=reason):
        parse_body(data)


def test_message_shows_the_beginning_of_a_value():
    """Without writing the rest, which may be megabytes."""
    assert shorten(["a"] * 100 + [object()]) == json.dumps(["a"] * 100)[:59] + "…"
    assert shorten({"a": [1, None]}) == '{"a": [1, null]}'


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
    "options",
    [
        *("x", [], {"include_usage": "yes"}, {"continuous_usage_stats": 1}),
        {"include_obfuscation": True},
    ],
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


def test_most_likely_tokens_are_limited_with_and_without_logprobs(parser):
    for logprobs in ({}, {"logprobs": True}):
        with pytest.raises(RequestError, match="from 0 to 20"):
            parser.chat({"messages": MESSAGES, "top_logprobs": 21, **logprobs})
    with pytest.raises(RequestError, match="needs logprobs=true"):
        parser.chat({"messages": MESSAGES, "top_logprobs": 1})


def test_log_probabilities_of_the_prompt_are_limited_in_streams(parser):
    for parse, body in (
        (parser.completion, {"prompt": "a"}),
        (parser.chat, {"messages": MESSAGES}),
    ):
        with pytest.raises(RequestError, match="from 0 to 20"):
            parse({**body, "prompt_logprobs": -1, "stream": True})
        with pytest.raises(RequestError, match="needs stream=false"):
            parse({**body, "prompt_logprobs": 1, "stream": True})


def test_max_tokens_is_not_read_beside_max_completion_tokens(parser):
    body = {"prompt": "a", "max_tokens": "many"}
    (request,) = parser.completion({**body, "max_completion_tokens": 3}).requests
    assert request.params.max_new_tokens == 3
    with pytest.raises(RequestError, match="max_tokens must be a whole number") as caught:
        parser.completion(body)
    assert caught.value.param == "max_tokens"


def test_server_without_tools_reads_none(parser):
    parser.allows_tools = False
    responses = {"input": "ab", "tools": [{"type": "function"}]}
    for parse in (
        lambda: parser.chat({"messages": MESSAGES, "tools": [{"type": "x"}]}),
        lambda: parser.chat({"messages": MESSAGES, "tools": "all"}),
        lambda: parser.responses(JsonBody(responses)),
    ):
        with pytest.raises(RequestError, match="takes no tools") as caught:
            parse()
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    parser.chat({"messages": MESSAGES, "tools": []})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "x"}], "tool_choice": "x"},
        {"chat_template_kwargs": {"tools": []}},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_fields_of_a_conversation_beside_a_text(parser, fields):
    """They do not act in /tokenize; beside messages they are errors."""
    assert JsonBody({"prompt": "ab", **fields}).parse(TokenizeRequest).prompt == "ab"
    with pytest.raises(RequestError) as caught:
        parser.chat_text(JsonBody({"messages": MESSAGES, **fields}).parse(TokenizeRequest))
    assert caught.value.param in fields


def test_text_and_conversation_exclude_each_other():
    """Whatever their values are."""
    for prompt, messages in (("ab", MESSAGES), (3, MESSAGES), ("ab", [3])):
        with pytest.raises(RequestError, match="either prompt or messages"):
            JsonBody({"prompt": prompt, "messages": messages}).parse(TokenizeRequest)
    for body in ({}, {"prompt": None}, {"add_special_tokens": 3}):
        with pytest.raises(RequestError, match="prompt or messages is missing"):
            JsonBody(body).parse(TokenizeRequest)


def test_defaults(parser):
    """Those of OpenAI's API, below those of the model, below the request's own."""
    (request,) = parser.completion({"prompt": "abc"}).requests
    assert request.prompt == [1, 97, 98, 99]
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
    assert {message.to_json()[each] for each in ("reasoning", "reasoning_content", "thinking")} == {
        "Hm"
    }


def test_too_long_names_both_numbers(parser):
    with pytest.raises(RequestError, match=r"40 tokens.* 35 tokens.* 6") as caught:
        parser.completion({"prompt": "x" * 34, "max_tokens": 6})
    assert caught.value.code == "context_length_exceeded"
    body = {"prompt": "x" * 35, "max_tokens": 6, "truncate_prompt_tokens": 3}
    assert parser.completion(body).requests[0].prompt == [120] * 3


def test_deep_arguments_of_a_call_are_refused():
    """They are JSON in a text, which templates see as an object."""
    for depth, is_refused in ((128, False), (129, True)):
        call = {"function": {"name": "f", "arguments": '{"a":' * depth + "0" + "}" * depth}}
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        if is_refused:
            with pytest.raises(RequestError, match="nested more than 128 levels deep"):
                parse_messages(body)
        else:
            parse_messages(body)


def test_prompts_share_what_a_request_says_about_many_tokens(parser):
    """A thousand prompts with 100,000 biases take their memory and time once."""
    body = {"prompt": ["a", "b", "c"], "logit_bias": {str(token): 1 for token in range(1000)}}
    arrays = {id(each.params.token_arrays) for each in parser.completion(body).requests}
    assert len(arrays) == 1


def test_long_text_is_refused_without_its_tokens(parser):
    """Tokens of 8 characters at most: 321 characters are 41 tokens or more."""

    def fail(text, *how):
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


def test_only_the_end_of_a_truncated_text_is_tokenized(parser):
    sizes = []

    def encode(text, specials):
        sizes.append(len(text))
        return list(text.encode())

    parser.model.encode = encode
    text = "x" * 100_000 + "abc"
    options = {"truncate_prompt_tokens": 3, "max_tokens": 1}
    for parse, body in (
        (parser.completion, {"prompt": text}),
        (parser.chat, {"messages": [{"role": "user", "content": text}]}),
    ):
        assert parse({**body, **options}).requests[0].prompt == list(b"abc")
    assert max(sizes) < 1000


def test_default_of_max_tokens(parser):
    """16 tokens, or what the maximum length leaves; 40 tokens leave none."""
    for size, count in ((10, 16), (34, 5)):  # and a special token
        (request,) = parser.completion({"prompt": "x" * size}).requests
        assert request.params.max_new_tokens == count
    with pytest.raises(RequestError, match="40 tokens") as caught:
        parser.completion({"prompt": "x" * 39})
    assert caught.value.code == "context_length_exceeded"


def test_echo_is_the_truncated_prompt(parser):
    body = {"prompt": ["abcdef", "gh"], "echo": True, "truncate_prompt_tokens": 3}
    assert parser.completion(body).echoes == ("def", "\x01gh")


def test_reasoning_effort_none_disables_thinking(parser):
    (request,) = parser.chat({"messages": MESSAGES, "reasoning_effort": "none"}).requests
    assert request.prompt == [97, 98, 1, 1]  # two variables of the template


def test_unknown_names(parser):
    assert parser.completion({"prompt": "a", "chat_id": "x"}).ignored_fields == ("chat_id",)
    strict = BodyParser(parser.model, strict_fields=True)
    with pytest.raises(RequestError, match="chat_id"):
        strict.completion({"prompt": "a", "chat_id": "x"})


@pytest.mark.parametrize(
    ("suffix", "role"), [("", "system"), ("{% if role == 'developer' %}{% endif %}", "developer")]
)
def test_template_without_developers_gets_a_system_message(suffix, role):
    template = ChatTemplate("{% for m in messages %}{{ m.role }} {% endfor %}" + suffix, "a test")
    model = ServedModel(None, None, None, ["tiny"], chat_template=template)
    messages = [Message.plain(name, "x") for name in ("developer", "user")]
    assert model.render_chat(messages, {}) == f"{role} user "


def test_template_does_not_see_content_that_is_null():
    """transformers drops null fields; a template would write None."""
    template = ChatTemplate("{% for m in messages %}<{{ m['content'] }}>{% endfor %}", "a test")
    model = ServedModel(None, None, None, ["tiny"], chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert model.render_chat(parse_messages({"messages": messages}), {}) == "<>"


def test_neutral_values_of_unsupported_fields(parser):
    neutral = {
        **{"modalities": ["text"], "suffix": "", "priority": 0, "use_beam_search": False},
        **{"length_penalty": 1.0, "documents": [], "function_call": "none", "vllm_xargs": {}},
        **{"include_reasoning": True, "truncation_side": "left", "logits_processors": []},
        **{"mm_processor_kwargs": {}, "repetition_detection": None},
    }
    assert parser.completion({"prompt": "x", **neutral}).ignored_fields == ()


# Fields of vLLM's protocol, with values that would change the completion or the response.
UNSUPPORTED = {
    "length_penalty": 0.8,
    "documents": [{"title": "a", "text": "b"}],
    "prompt_embeds": "x",
    "thinking_token_budget": 5,
    "function_call": {"name": "f"},
    "use_beam_search": True,
    "early_stopping": True,
    "logits_processors": ["m.f"],
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"video": {}},
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "priority": 1,
    "repetition_detection": {"max_pattern_size": 2},
    "include_reasoning": False,
    "truncation_side": "right",
    "structural_tag": "{}",
    "guided_whitespace_pattern": "x",
    "watermarking": True,
    "logprob_token_ids": [5],
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "ec_transfer_params": {"a": 1},
}
# The fields of vLLM's ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest.
SAMPLING = """frequency_penalty logit_bias n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens
    response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval model logprobs max_tokens echo guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors best_of"""
VLLM_FIELDS = {
    CompletionRequest: f"{SAMPLING} prompt suffix prompt_embeds",
    ChatRequest: f"""{SAMPLING} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text""",
    ResponsesRequest: """background include input instructions max_output_tokens max_tool_calls
        metadata model logit_bias parallel_tool_calls previous_response_id prompt reasoning
        service_tier store stream temperature text tool_choice tools top_logprobs top_p top_k
        truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key request_id
        mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
        previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs""",
    TokenizeRequest: """model prompt add_special_tokens return_token_strs messages
        add_generation_prompt continue_final_message chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs tools""",
}


@pytest.mark.parametrize(("kind", "names"), VLLM_FIELDS.items())
def test_fields_of_vllm_act_or_are_refused_or_documented(kind, names):
    """No such field is among the unknown names, which are ignored."""
    assert set(names.split()) <= kind.known_fields()
    docs = Path("docs/serving.md").read_text()
    unmentioned = [name for name in (*INERT_FIELDS, *UNSUPPORTED_FIELDS) if f"`{name}`" not in docs]
    assert not unmentioned


def test_every_field_of_sampling_params_is_one_of_all_bodies():
    """But for those with other names: max_tokens, max_output_tokens."""
    names = {each.name for each in dataclasses.fields(SamplingParams)} - {"max_new_tokens"}
    for kind in (CompletionRequest, ChatRequest):
        assert names <= kind.known_fields()
    assert names - {"n", "logprobs"} <= ResponsesRequest.known_fields()
    assert names - {"logprobs", "prompt_logprobs"} <= set(BatchLine.model_fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, {"messages": MESSAGES, "tools": [1], "reasoning_effort": "low"}),
        (CompletionRequest, {"top_logprobs": 2, "chat_template_kwargs": {"a": 1}}),
        (ChatRequest, {"prompt": "x", "instructions": "x", "max_output_tokens": 3}),
        (ChatRequest, {"text": {"format": {}}, "reasoning": {"effort": "low"}, "input": "x"}),
        (ResponsesRequest, {"max_tokens": 3, "n": 2, "messages": MESSAGES, "echo": True}),
        (ResponsesRequest, {"response_format": {"type": "json_object"}, "reasoning_effort": "low"}),
        (TokenizeRequest, {"truncate_prompt_tokens": 5, "input": "x", "chat_template": "x"}),
        (DetokenizeRequest, {"skip_special_tokens": True, "prompt": "x"}),
    ],
)
def test_field_of_another_endpoint_is_refused(kind, fields):
    """It would change the completion there."""
    neutral = {"n": 1, "tools": [], "response_format": {"type": "text"}, "echo": False, "user": "u"}
    for name, value in fields.items():
        with pytest.raises(RequestError, match=name) as caught:
            check_names({name: value}, kind)
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        assert check_names({**neutral, "chat_id": 1}, kind) == ("chat_id",)


def test_fields_without_effect(parser):
    fields = {
        "session_id": "a",
        "stream_interval": 5,
        "return_mm_kwargs": False,
        "verbosity": "low",
    }
    for parse, body in (
        (parser.completion, {"prompt": "a"}),
        (parser.chat, {"messages": MESSAGES}),
    ):
        plain, request = parse({**body, "seed": 1}), parse({**body, "seed": 1, **fields})
        assert request == plain


def test_structured_outputs_as_vllm_writes_them(parser):
    """With the fields that are not set, and beside a response_format of text."""
    unset = {"json": None, "regex": None, "structural_tag": None, "disable_any_whitespace": False}
    for given, text in (
        ({"json_object": True}, '{"type": "object"}'),
        ({"choice": ["a"]}, '["a"]'),
    ):
        body = {"structured_outputs": {**unset, **given}, "response_format": {"type": "text"}}
        (request,) = parser.completion({"prompt": "a", **body}).requests
        assert request.params.structured_outputs.text == text
    for option in ({"disable_any_whitespace": True}, {"whitespace_pattern": " "}, {}):
        with pytest.raises(RequestError, match="exactly one"):
            parser.completion({"prompt": "a", "structured_outputs": {**option, "choice": None}})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_field_that_would_change_the_completion_is_refused(parser, name):
    for parse, body in (
        (parser.completion, {"prompt": "a"}),
        (parser.chat, {"messages": MESSAGES}),
    ):
        with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
            parse({**body, name: UNSUPPORTED[name]})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value", "constraint"),
    [
        ("guided_json", {"type": "null"}, ("json", '{"type": "null"}')),
        ("guided_json", '{"type": "null"}', ("json", '{"type": "null"}')),
        ("guided_regex", "[0-9]+", ("regex", "[0-9]+")),
        ("guided_choice", ["a", "b"], ("choice", '["a", "b"]')),
        ("guided_grammar", 'root ::= "a"', ("grammar", 'root ::= "a"')),
    ],
)
def test_guided_fields_are_structured_outputs(parser, name, value, constraint):
    for request in (
        parser.completion({"prompt": "a", name: value}),
        parser.chat({"messages": MESSAGES, name: value}),
    ):
        structured = request.requests[0].params.structured_outputs
        assert (structured.kind, structured.text) == constraint
        assert structured.param == name
    for wrong in ({name: 1}, {name: value, "structured_outputs": {"regex": "a"}}):
        with pytest.raises(RequestError) as caught:
            parser.completion({"prompt": "a", **wrong})
        assert caught.value.param in (name, "structured_outputs")


def test_tokens_that_are_allowed_and_words_that_are_not(parser):
    fields = {"allowed_token_ids": [97, 98], "bad_words": ["ab"]}
    for request in (
        parser.completion({"prompt": "a", **fields}),
        parser.chat({"messages": MESSAGES, **fields}),
    ):
        params = request.requests[0].params
        assert (params.allowed_token_ids, params.bad_words) == ((97, 98), ("ab",))


def test_special_tokens_of_prompts(parser):
    """By default those of completions are added, and a chat has those that its template writes."""
    for parse, body, default in (
        (parser.completion, {"prompt": "ab"}, True),
        (parser.chat, {"messages": MESSAGES}, False),
    ):
        for added in (None, True, False):
            given = {} if added is None else {"add_special_tokens": added}
            has_special = default if added is None else added
            (request,) = parse({**body, **given}).requests
            assert request.prompt == [1] * has_special + [97, 98]


def test_required_call_with_a_response_format(parser):
    """The format is that of content, of which a call has none."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
    body = {"messages": MESSAGES, "tools": tools, "response_format": schema}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (request,) = parser.chat({**body, "tool_choice": choice}).requests
        assert request.params.structured_outputs.param == "tools"
    del body["response_format"]
    with pytest.raises(RequestError, match="format of its own"):
        parser.chat({**body, "tool_choice": "required", "guided_regex": "a"})


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({"content": None, "reasoning_content": "Hm"}, ""),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({}, ""),
    ],
)
def test_messages_of_the_model_without_text(message, text):
    (parsed,) = parse_messages({"messages": [{"role": "assistant", **message}]})
    assert parsed.content == text


def test_errors_become_statuses(caplog):
    full = ApiError.from_exception(EngineError("full", "queue_full", retry_after=2.4), "id1")
    assert (full.status, full.code, full.headers) == (429, "queue_full", {"Retry-After": "2"})
    wrong = ApiError.from_exception(RequestError("no", "max_new_tokens"), "id1")
    assert (wrong.status, wrong.param) == (400, "max_tokens")
    fault = ApiError.from_exception(ZeroDivisionError("secret"), "id1")
    assert (fault.status, fault.code) == (500, "internal_error")
    assert "secret" not in str(fault)
    assert "id1" in str(fault)
