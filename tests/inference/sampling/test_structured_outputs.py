"""Structured output: the text matches its grammar, and the tokens are those of masking every step.

The model is random, with a token for each byte, so that nothing but the masks leads to JSON.
"""

import json
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.executor import Executor
from maxtext.inference.errors import EngineError
from maxtext.inference.sampling.grammar import GrammarCompiler, fill_masks
from maxtext.inference.sampling.sampler import BatchedSamplingParams, sample, token_keys
from maxtext.inference.sampling.structured_outputs import StructuredOutputs, parse_response_format
from maxtext.inference.validation import RequestError
from maxtext.tokenizers import ByteTokenizer
from tests.support.random_requests import (
    HARDEST,
    LAYOUTS,
    VOCABULARY,
    compiled,
    random_weights,
)
from tests.support.schemas import SCHEMAS, SIZES

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.usefixtures("few_programs")

EOS = 2


@pytest.fixture(scope="module")
def byte_llm():
    return LLM.load("qwen3-0.6b", **SIZES)


def request(constraint, prompt="Say", **params):
    params = {"temperature": 1.0, "max_new_tokens": 200} | params
    return GenerationRequest(prompt, SamplingParams(structured_outputs=constraint, **params))


def complete(llm, requests):
    return sorted(llm.completions(iter(requests)), key=lambda completion: completion.index)


@pytest.mark.slow
def test_json_of_a_random_model_validates(byte_llm):
    """In a batch with free requests, which do not change."""
    free = [
        GenerationRequest(prompt, SamplingParams(temperature=1.0, max_new_tokens=30, seed=seed))
        for seed, prompt in enumerate(["one", "two", "three"])
    ]
    alone = [completion.token_ids for completion in complete(byte_llm, free)]
    constrained = [request({"json": SCHEMAS[i % 4]}, seed=i) for i in range(12)]
    completions = complete(byte_llm, [*free, *constrained])
    assert [completion.token_ids for completion in completions[:3]] == alone
    for index, completion in enumerate(completions[3:]):
        assert (completion.finish_reason, completion.error) == ("end", None)
        jsonschema.validate(json.loads(completion.text), SCHEMAS[index % 4])
    assert len({completion.text for completion in completions[3:]}) > 8


def mask_every_step(llm, request):
    """The tokens of a request, with a mask for each of them, from the logits of the whole
    sequence.
    """
    params, tokenizer = request.params, ByteTokenizer()
    compiler = GrammarCompiler(tokenizer, llm.config.vocab_size, [EOS])
    matcher = compiler.matcher(params.structured_outputs).inner
    ids = tokenizer.encode_prompt(request.prompt)
    start = len(ids)
    while len(ids) - start < params.max_new_tokens and not matcher.is_stopped():
        padded = np.zeros(64, np.int32)
        padded[: len(ids)] = ids
        logits = np.array(llm.logits(padded)[len(ids) - 1], np.float32)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
        batched = BatchedSamplingParams.from_params([params])
        keys = token_keys(batched.seed, np.array([len(ids)]))
        token = int(sample(jnp.asarray(logits)[None], keys, batched, params.mode)[0])
        assert matcher.consume_token(token)
        ids.append(token)
    return ids[start:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"top_k": 40}, {"min_p": 0.4}],
    ids=["sampled", "greedy", "top_k", "min_p"],
)
def test_tokens_are_those_of_a_mask_in_every_step(byte_llm, params, monkeypatch):
    """A regex with some freedom, so that free samples are often allowed and often not. Without
    truncation, a program gives several tokens.
    """
    programs = []

    def spy(executor, batch, decode=Executor.decode):
        programs.append(batch)
        return decode(executor, batch)

    monkeypatch.setattr(Executor, "decode", spy)
    constraint = {"regex": "[^a-m]{3,20}[a-z]{2}"}
    requests = [request(constraint, seed=seed, max_new_tokens=40, **params) for seed in range(3)]
    got = [list(completion.token_ids) for completion in complete(byte_llm, requests)]
    assert got == [mask_every_step(byte_llm, each) for each in requests]
    longest = max(map(len, got))
    if params == {}:
        assert len(programs) < longest - 1
    elif "top_k" in params or "min_p" in params:
        assert len(programs) == longest - 1


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[a-c]{4}-\d{2}"}, r"[a-c]{4}-\d{2}"),
        ({"choice": ["alpha", "beta", 'a "quoted" one']}, 'alpha|beta|a "quoted" one'),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
@pytest.mark.slow
def test_kinds_of_constraints(byte_llm, constraint, pattern):
    for completion in complete(byte_llm, [request(constraint, seed=seed) for seed in range(4)]):
        assert completion.finish_reason == "end"
        assert re.fullmatch(pattern, completion.text)


@pytest.mark.slow
def test_choices_and_penalties(byte_llm):
    """Each choice has a matcher of its own, and penalties act on what the grammar allows."""
    penalized = request({"regex": "[ab]{12}"}, n=3, seed=4, frequency_penalty=2.0)
    texts = [completion.text for completion in complete(byte_llm, [penalized])]
    assert len(texts) == 3
    for text in texts:
        assert re.fullmatch("[ab]{12}", text)
        assert abs(text.count("a") - text.count("b")) <= 6
    greedy = request({"regex": "[ab]{12}"}, temperature=0.0, frequency_penalty=2.0)
    (text,) = [completion.text for completion in complete(byte_llm, [greedy])]
    assert abs(text.count("a") - text.count("b")) <= 2


@pytest.mark.slow
def test_length_limit_cuts_the_text(byte_llm):
    (completion,) = complete(byte_llm, [request({"regex": "a{50}"}, max_new_tokens=7)])
    assert (completion.finish_reason, completion.text) == ("length", "a" * 7)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "sometimes"}}, "cannot be compiled: Invalid type: sometimes"),
        ({"json": "{"}, "has a schema that is not JSON"),
        ({"json": 5}, "must have a JSON schema, an object, not 5"),
        ({"json": {"minimum": float("nan")}}, "has a schema that is not JSON"),
        ({"regex": "(("}, "cannot be compiled: "),
        ({"regex": ""}, "structured_outputs.regex must be text"),
        ({"grammar": "start: missing"}, "cannot be compiled: "),
        ({"choice": []}, "choice must be a list of texts, none of them empty"),
        ({"choice": ["a", 5]}, "choice must be a list of texts"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of json, regex, choice, grammar"),
        ({"yaml": "a"}, "exactly one of json"),
        ("json", "exactly one of json"),
        ({"regex": "a" * ((1 << 18) + 1)}, "at most 262144"),
        ({"choice": [f"{n}" for n in range(10_001)]}, "has 10001 texts: at most 10000"),
        ({"json": {"multipleOf": 100_003}}, "has a multipleOf that is too large"),
        ({"json": {"multipleOf": 1.00003}}, "has a multipleOf that is too large"),
        ({"grammar": "start: a\n" * 2501}, "has 2501 rules: at most 2500"),
        ({"json": {"anyOf": [{"$ref": "#/x"}] * 2501}}, "has 2501 references: at most 2500"),
        ({"json": {"anyOf": [{"pattern": "x"}] * 1001}}, "has 1001 patterns: at most 1000"),
        ({"json": {"anyOf": [{"multipleOf": 60_000}, {"multipleOf": 50_000}]}}, "multipleOf"),
        ({"json": {"properties": {f"p{n}": {} for n in range(12_000)}}}, "cannot be compiled: "),
    ],
)
def test_invalid_constraints(constraint, message):
    compiler = GrammarCompiler(ByteTokenizer(), 290, [EOS])
    with pytest.raises(RequestError, match=message) as caught:
        compiler.matcher(SamplingParams(structured_outputs=constraint).structured_outputs)
    assert caught.value.param == "structured_outputs"


def test_response_format():
    assert parse_response_format({"type": "text"}) is None
    any_object = parse_response_format({"type": "json_object"})
    assert json.loads(any_object.text) == {"type": "object"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMAS[0]}}
    constraint = parse_response_format(wrapped)
    assert (constraint.kind, json.loads(constraint.text)) == ("json", SCHEMAS[0])
    bad = [
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": 5},
        "x",
    ]
    for value in bad:
        with pytest.raises(RequestError, match=r"response_format\.") as caught:
            parse_response_format(value)
        assert caught.value.param == "response_format"


def test_constraints_are_compiled_once(monkeypatch):
    compiler = GrammarCompiler(ByteTokenizer(), 290, [EOS])
    texts = []

    def spy(constraint, run=compiler.compile):
        texts.append(constraint.text)
        return run(constraint)

    monkeypatch.setattr(compiler, "compile", spy)
    monkeypatch.setattr("maxtext.inference.sampling.grammar.MAX_CACHED", 2)
    for text in ("a+", "b+", "a+", "c+", "a+", "b+"):
        matcher = compiler.matcher(StructuredOutputs("regex", text))
        assert matcher.accept(ByteTokenizer().encode(text[0] + "!")) == 1
    assert texts == ["a+", "b+", "c+", "b+"]  # b+ was the least recently used


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({"choice": [f"item {n}" for n in range(10_000)]}, "item 9999"),
        ({"choice": ["a"] * 10_000}, "a"),
        ({"choice": ["é", "\U0001f600", '"\\\n/ | B']}, '"\\\n/ | B'),
        ({"json": {"type": "number", "multipleOf": 0.25}}, "0.75"),
        (
            {"json": {"type": "object", "properties": {"multipleOf": {"const": 10**9}}}},
            '{"multipleOf":1000000000}',
        ),
        ({"json": {"enum": ['"multipleOf": 1000000000']}}, r'"\"multipleOf\": 1000000000"'),
    ],
)
def test_constraints_within_the_limits(constraint, text):
    tokenizer = ByteTokenizer()
    matcher = GrammarCompiler(tokenizer, 290, [EOS]).matcher(StructuredOutputs.parse(constraint))
    ids = tokenizer.encode(text)
    for token in ids:
        mask = np.zeros((1, matcher.num_words), np.uint32)
        fill_masks([matcher], [0], mask)
        assert mask[0, token // 32] >> (token % 32) & 1
        assert matcher.accept([token]) == 1
    assert not matcher.error


def test_choice_that_begins_another():
    """May end, or go on."""
    tokenizer = ByteTokenizer()
    compiler = GrammarCompiler(tokenizer, 290, [EOS])
    matcher = compiler.matcher(StructuredOutputs.parse({"choice": ["no", "none"]}))
    assert matcher.accept(tokenizer.encode("no")) == 2
    assert not matcher.is_complete
    assert matcher.copy().accept([EOS]) == 1
    assert matcher.accept(tokenizer.encode("nex")) == 2
    assert matcher.is_complete


def test_constraint_without_any_text():
    """The error says so, not the name that the library has for it."""
    references = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    compiler = GrammarCompiler(ByteTokenizer(), 290, [EOS])
    with pytest.raises(RequestError, match="cannot be compiled: no text can match it"):
        compiler.matcher(StructuredOutputs.parse({"json": references}))


def test_requests_do_not_wait_for_slow_grammars(monkeypatch):
    """The library cannot be interrupted: its thread goes on, and later requests get the result."""
    compiler = GrammarCompiler(ByteTokenizer(), 290, [EOS])
    may_end = threading.Event()
    started = []

    def wait(constraint, run=compiler.compile):
        started.append(constraint.text)
        if constraint.text != "fast":
            assert may_end.wait(60)
        return run(constraint)

    monkeypatch.setattr(compiler, "compile", wait)
    monkeypatch.setattr("maxtext.inference.sampling.grammar.COMPILE_SECONDS", 0.05)
    slow = [StructuredOutputs("regex", f"slow{index}") for index in range(4)]
    for constraint in (*slow, slow[0]):  # the last waits for the thread of the first
        with pytest.raises(RequestError, match=r"takes longer than 0\.05 seconds") as caught:
            compiler.matcher(constraint)
        assert caught.value.param == "structured_outputs"
    assert started == ["slow0", "slow1", "slow2", "slow3"]
    with pytest.raises(EngineError) as refused:
        compiler.matcher(StructuredOutputs("regex", "fast"))
    assert refused.value.code == "grammar_queue_full"
    may_end.set()
    monkeypatch.setattr("maxtext.inference.sampling.grammar.COMPILE_SECONDS", 60)
    for constraint in (*slow, StructuredOutputs("regex", "fast")):
        token_ids = ByteTokenizer().encode(constraint.text)
        assert compiler.matcher(constraint).accept(token_ids) == len(token_ids)
    assert started == ["slow0", "slow1", "slow2", "slow3", "fast"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("causal", HARDEST),
        ("window", "contiguous"),
        pytest.param("recomputed", "chunked", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kind_of_cache(kind, layout):
    """Caches that can drop tokens and caches that cannot, with preemptions. The vocabulary of 41
    has the characters from space to %.
    """
    compiler = GrammarCompiler(ByteTokenizer(), VOCABULARY, [EOS])
    constraint = StructuredOutputs("regex", "[ !#$%]{4,9}")
    programs, weights = compiled(kind, *LAYOUTS[layout]), random_weights(kind)

    def generate(indices):
        engine = InferenceEngine(programs, weights, 4, 64)
        tokens = {index: [] for index in indices}
        for index in indices:
            prompt = [(7 * index + position) % 38 + 3 for position in range(9)]
            params = SamplingParams(1.0, max_new_tokens=12, seed=index, stop_token_ids=(EOS,))
            grammar = compiler.matcher(constraint) if index % 2 else None
            engine.add_request(index, GenerationRequest(prompt, params), grammar=grammar)
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None
                tokens[output.request_id] += output.sampled_tokens
        assert engine.prefix_cache.pool.num_referenced == 0
        return tokens

    together = generate(range(8))
    for index in range(8):
        assert generate([index])[index] == together[index]
        if index % 2:
            assert re.fullmatch("[ !#$%]{4,9}", ByteTokenizer().decode(together[index]))


def test_ids_without_bytes_are_never_allowed():
    matcher = GrammarCompiler(ByteTokenizer(), 290, [EOS]).matcher(StructuredOutputs("regex", ".+"))
    masks = np.zeros((3, matcher.num_words), np.uint32)
    fill_masks([matcher], [1], masks)
    assert not masks[[0, 2]].any()
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")[:290]
    assert not bits[:3].any()
    assert not bits[259:].any()
    assert bits[ByteTokenizer().encode("a")].all()


def test_only_the_special_token_of_a_grammar_is_allowed():
    constraint = StructuredOutputs("regex", "a", preamble="<[1]>")
    matcher = GrammarCompiler(ByteTokenizer(), 290, [EOS]).matcher(constraint)
    masks = np.zeros((1, matcher.num_words), np.uint32)
    fill_masks([matcher], [0], masks)
    bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [1]


@pytest.mark.parametrize(
    "constraint",
    [
        {
            "grammar": "".join(f'r{n}: "a" r{n + 1}\n' for n in range(2400))
            + 'r2400: "a"\nstart: r0'
        },
        {
            "json": {
                "$ref": "#/$defs/0",
                "$defs": {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(2400)}
                | {"2400": {"type": "null"}},
            }
        },
    ],
)
def test_long_chain_does_not_end_the_process(constraint):
    """The library follows it by recursion."""
    tokenizer = ByteTokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id])
    text = "a" if "grammar" in constraint else "null"
    matcher = compiler.matcher(StructuredOutputs.parse(constraint))
    ids = tokenizer.encode_with_specials(text)
    assert matcher.accept(ids) == len(ids)
