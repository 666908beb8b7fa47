"""Speculative decoding through the Python API: the completions are those of a model without it."""

import json

import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.errors import ConfigError
from maxtext.inference import AsyncEngine
from maxtext.inference.engine.batches import BatchBuilder
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.server.metrics import ServerMetrics

pytestmark = pytest.mark.usefixtures("few_programs")
KEYS = dict(
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    attention="dot_product",
)
NGRAMS = dict(speculative_method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    """Engines draft whether that pays or not."""
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 0)


@pytest.fixture(scope="module")
def drafting_llm(folder):
    return LLM.load(folder, **KEYS, **NGRAMS)


OPTIONS = {
    "greedy": {},
    "sampled": dict(temperature=1.0, seed=4),
    "truncated": dict(temperature=1.3, top_k=9, top_p=0.9, seed=5),
    "min_p": dict(temperature=1.3, min_p=0.1, seed=6),
    "penalties": dict(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "sampled with penalties": dict(temperature=1.0, seed=7, frequency_penalty=-0.5),
    "bias": dict(logit_bias={7: 4.0, 8: -3.0}),
    "minimum length": dict(min_tokens=9, stop_token_ids=tuple(range(3, 40))),
    "many stop ids": dict(temperature=1.0, seed=8, stop_token_ids=tuple(range(30, 45))),
    "stop": dict(stop=("w7", "w21")),
    "allowed tokens": dict(allowed_token_ids=(5, 6, 7), temperature=1.0, seed=9),
    "bad words": dict(bad_words=("w7", "w21")),
    "log-probabilities": dict(logprobs=2, temperature=1.0, seed=10),
    "prompt": dict(prompt_logprobs=1),
    "choices": dict(n=3, temperature=1.0, seed=11),
}


def test_every_option_has_the_same_completions(llm, drafting_llm):
    """Of requests that run together: rows that may not draft share programs with others."""
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    requests = []
    for count, options in enumerate(OPTIONS.values()):
        params = SamplingParams(**{"max_new_tokens": 12 + count, "ignore_eos": True} | options)
        requests.append(GenerationRequest([*prompt, 3 + count], params))

    def completions(model):
        return sorted(model.completions(requests), key=lambda each: (each.index, each.choice))

    expected, actual = completions(llm), completions(drafting_llm)
    assert len(actual) == len(expected) == len(OPTIONS) + 2
    for one, other in zip(actual, expected, strict=True):
        assert one.token_ids == other.token_ids, list(OPTIONS)[one.index]
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.error is None
        for tokens, others in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs[1:], other.prompt_logprobs[1:]),
        ):
            assert [each.top.keys() for each in tokens] == [each.top.keys() for each in others]
            np.testing.assert_allclose(
                [each.logprob for each in tokens], [each.logprob for each in others], atol=1e-5
            )
    drafts = drafting_llm.engine.drafts
    assert 0 < drafts.num_accepted < drafts.num_drafted


def test_metrics_of_the_server(drafting_llm):
    pytest.importorskip("prometheus_client")
    engine = AsyncEngine(drafting_llm, slots=2, length=64)
    try:
        metrics = ServerMetrics(engine, "m", prefix="vllm")
        params = SamplingParams(max_new_tokens=29, ignore_eos=True, logit_bias={7: 90.0})
        *_, last = engine.submit(GenerationRequest([3, 7, 7], params))
        assert last.completion.token_ids == (7,) * 29
    finally:
        engine.close()
    lines = metrics.render()[0].decode().splitlines()
    values = {
        name: float(line.split()[1])
        for line in lines
        for name in ("drafts", "draft_tokens", "accepted_tokens")
        if line.startswith(f'vllm:spec_decode_num_{name}_total{{model_name="m"}}')
    }
    # After the token of the prefill, each step drafts three tokens and samples another.
    assert values == {"drafts": 7, "draft_tokens": 21, "accepted_tokens": 21}


@pytest.mark.slow
def test_warm_up_compiles_programs_with_drafts_and_without(folder):
    llm = LLM.load(folder, **KEYS, **NGRAMS, max_prefill_predict_length=1, max_target_length=16)
    drafts = []
    llm.engine_for(llm.config.global_batch_size_to_load, 16)
    decode = BatchBuilder.decode

    def watch(self, *args):
        batch, columns = decode(self, *args)
        drafts.append(batch.num_drafts)
        return batch, columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchBuilder, "decode", watch)
        llm.warm_up()
    assert set(drafts) == {0, 3}
    assert llm.engine.drafts.num_drafts == 0


def test_a_draft_model_from_a_folder(folder, llm):
    """The model itself: all of its drafts are accepted."""
    drafting = LLM.load(
        folder, **KEYS, speculative_method="draft", speculative_model_path=str(folder)
    )
    params = dict(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    prompts = [[3, 4, 5], [6, 7]]
    assert drafting.generate(prompts, **params) == llm.generate(prompts, **params)
    assert drafting.engine.drafts.num_accepted == drafting.engine.drafts.num_drafted > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=64), "has vocab_size=64 and the model 61"),
        (dict(words=("w7", "w8")), "has another tokenizer: token 7 is 'w8' there and 'w7' in"),
    ],
    ids=["vocabulary", "tokenizer"],
)
def test_a_draft_model_with_other_tokens_is_refused(folder, tmp_path, changes, message):
    for file in folder.iterdir():
        text = file.read_bytes()
        if file.name == "config.json" and "vocab_size" in changes:
            text = json.dumps(json.loads(text) | changes).encode()
        if file.name == "tokenizer.json" and "words" in changes:
            one, other = changes["words"]
            contents = json.loads(text)
            vocabulary = contents["model"]["vocab"]
            vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
            text = json.dumps(contents).encode()
        (tmp_path / file.name).write_bytes(text)
    keys = dict(speculative_method="draft", speculative_model_path=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        LLM.load(folder, **KEYS, **keys)
    assert message in str(error.value)


def test_an_absent_draft_model(folder):
    keys = dict(speculative_method="draft", speculative_model_path="/no/such/folder")
    with pytest.raises(ConfigError, match="there is no folder /no/such/folder"):
        LLM.load(folder, **KEYS, **keys)


def test_a_model_without_mtp_layers(folder):
    with pytest.raises(ConfigError) as error:
        LLM.load(folder, **KEYS, speculative_method="mtp")
    assert "a multi-token prediction layer, which this model does not have" in str(error.value)
