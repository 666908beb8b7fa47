"""The Python API against transformers: logits, completions, text, folders, several devices, and
invalid calls.
"""

import json
import logging
from dataclasses import replace
from itertools import zip_longest

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from maxtext import LLM
from maxtext.common import progress
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.log import LOGGER
from maxtext.configs import startup
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine.executor import Executor
from maxtext.layers.context import REFERENCE
from tests.compiling import cpu_devices
from tests.forked import run_python

torch = pytest.importorskip("torch")
FEW = pytest.mark.usefixtures("few_programs")

EXACT = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}


def new_request(prompt, max_new_tokens, **params):
    return GenerationRequest(prompt, SamplingParams(max_new_tokens=max_new_tokens, **params))


def hf_logits(model, rows):
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.asarray(rows)), use_cache=False).logits.numpy()


def hf_greedy(model, row, count):
    row = [int(token) for token in row]
    for _ in range(count):
        row.append(int(hf_logits(model, [row])[0, -1].argmax()))
    return row[-count:]


def test_logits(llm, model, ids):
    expected = hf_logits(model, ids)
    np.testing.assert_allclose(llm.logits(ids), expected, atol=1e-5)
    np.testing.assert_allclose(llm.logits(ids[0]), expected[0], atol=1e-5)
    np.testing.assert_allclose(llm.logits(ids[:1].tolist()), expected[:1], atol=1e-5)


def test_greedy_ids(llm, model, ids):
    got = llm.generate(ids, max_new_tokens=6, ignore_eos=True)
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [hf_greedy(model, row, 6) for row in ids]


def test_prompts_of_mixed_lengths(llm, model, ids):
    prompts = [ids[0, :3].tolist(), ids[1].tolist(), ids[2, :1].tolist()]
    assert llm.generate(prompts, 5, ignore_eos=True) == [
        hf_greedy(model, prompt, 5) for prompt in prompts
    ]


@FEW
def test_row_ends_with_the_end_of_sequence_token(folder, model, ids, tmp_path):
    """generation_config.json declares the third greedy token of the first row an end-of-sequence
    token.
    """
    free = [hf_greedy(model, row, 6) for row in ids]
    end = free[0][2]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1]}))
    llm = LLM.load(tmp_path, **EXACT)
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert len(cut[0]) == 3
    assert llm.generate(ids.tolist(), 6) == cut
    width = max(map(len, cut))
    assert llm.generate(ids, 6).tolist() == [row + row[-1:] * (width - len(row)) for row in cut]
    assert llm.generate(ids, 6, ignore_eos=True).tolist() == free


@FEW
def test_text_in_text_out(llm, model):
    """The tokenizer puts <s> before a prompt; the completion has no special tokens."""
    token_ids = hf_greedy(model, [0, 5, 9], 4)
    assert 1 not in token_ids
    text = "".join(f" w{token}" for token in token_ids if token > 2)
    assert text
    assert llm.generate("w5 w9", max_new_tokens=4) == text
    assert llm.generate(["w5 w9", "w7"], max_new_tokens=4)[0] == text


@pytest.mark.slow
def test_samples_follow_the_distribution(llm, model, ids):
    """One token of 4000 rows with the same prompt against softmax(logits / T), by chi square at 1
    in 10^4.
    """
    from scipy import stats

    prompt = ids[:1]
    logits = hf_logits(model, prompt)[0, -1].astype(np.float64)
    for options, num_kept in (({}, len(logits)), ({"top_k": 5}, 5), ({"top_p": 0.6}, None)):
        scaled = np.exp((logits - logits.max()) / 1.5)
        scaled /= scaled.sum()
        order = np.argsort(-scaled)
        if num_kept is None:
            num_kept = int(np.searchsorted(np.cumsum(scaled[order]), 0.6) + 1)
        expected = np.zeros_like(scaled)
        expected[order[:num_kept]] = scaled[order[:num_kept]] / scaled[order[:num_kept]].sum()
        drawn = llm.generate(
            np.repeat(prompt, 4000, 0), 1, temperature=1.5, seed=3, ignore_eos=True, **options
        )
        counts = np.bincount(drawn[:, 0], minlength=len(logits))
        assert counts[expected == 0].sum() == 0
        likely = expected * 4000 >= 5
        observed = [*counts[likely], counts[~likely].sum()]
        wanted = [*(expected[likely] * 4000), expected[~likely].sum() * 4000]
        pairs = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]
        assert stats.chisquare(*zip(*pairs, strict=True)).pvalue > 1e-4


@FEW
def test_seed_determines_the_tokens(llm, ids):
    first, same_seed, other_seed = (
        llm.generate(ids, 8, temperature=2.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)
    )
    assert (first == same_seed).all()
    assert (first != other_seed).any()


@FEW
def test_stream_and_stop_texts(llm):
    """Deltas make up the text; a stop string ends it before that text."""
    text = llm.generate("w5 w9", max_new_tokens=12, ignore_eos=True)
    deltas = list(llm.stream("w5 w9", max_new_tokens=12, ignore_eos=True))
    assert "".join(deltas) == text
    word = text.split()[2]
    before = text[: text.index(f" {word}")]
    assert llm.generate("w5 w9", max_new_tokens=12, ignore_eos=True, stop=[f" {word}"]) == before
    (completion,) = llm.completions([new_request("w5 w9", 12, stop=(f" {word}",), ignore_eos=True)])
    assert (completion.finish_reason, completion.text) == ("stop", before)
    assert (
        sum(token > 2 for token in completion.token_ids) == before.count(" w") + 1
    )  # the others are special tokens
    again = list(
        llm.stream("w5 w9", max_new_tokens=12, ignore_eos=True)
    )  # the slot that was stopped is free
    assert again == deltas


@FEW
@pytest.mark.slow
def test_invalid_request_does_not_affect_the_others(llm):
    good = new_request([5, 6], 4, ignore_eos=True)
    requests = [
        good,
        new_request([], 4),
        new_request([5, 61], 4),
        new_request("w5", 0),
        new_request([5] * 127, 4, ignore_eos=True),
        good,
    ]
    for given in (iter(requests), requests):
        completions = sorted(llm.completions(given), key=lambda completion: completion.index)
        assert [completion.index for completion in completions] == list(range(6))
        assert [completion.finish_reason for completion in completions] == [
            "length",
            "error",
            "error",
            "error",
            *["length"] * 2,
        ]
        assert completions[0].token_ids == completions[5].token_ids
        assert completions[0].text == completions[5].text
    errors = [completion.error or "" for completion in completions]
    assert "empty" in errors[1]
    assert "token id 61" in errors[2]
    assert "max_new_tokens=0" in errors[3]


@FEW
def test_two_streams_at_a_time(llm):
    """A second stream has its own engine while the first one is running."""
    prompts = ("w5 w9", "w7")
    expected = [llm.generate(prompt, max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    streams = [llm.stream(prompt, max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    deltas = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(texts) for texts in zip(*deltas, strict=True)] == expected


@FEW
@pytest.mark.slow
def test_weights_keep_their_layout_while_any_engine_is_leased(llm, monkeypatch):
    """Even if the leased engine is not the last one that was created."""
    slots = []
    monkeypatch.setattr(llm.model, "build_for", slots.append)
    stream = llm.stream("w5", max_new_tokens=100, ignore_eos=True)
    next(stream)
    slots.clear()
    for count in (2, 3):
        llm.generate(["w5"] * count, max_new_tokens=2, ignore_eos=True)
    assert slots == []
    stream.close()
    llm.generate(["w5"] * 2, max_new_tokens=2, ignore_eos=True)
    assert slots == [2]


@FEW
@pytest.mark.slow
def test_interrupted_step_is_not_cached(folder, monkeypatch):
    """Blocks that an interrupted prefill did not compute are not in the prefix cache."""
    llm = LLM.load(
        folder,
        **EXACT,
        enable_prefix_caching=True,
        pagedattn_tokens_per_page=4,
        max_target_length=64,
    )
    prompt = list(range(5, 25))
    expected = LLM.load(folder, **EXACT).generate(prompt, 6, ignore_eos=True)

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, 6, ignore_eos=True)
    for _ in range(2):
        assert llm.generate(prompt, 6, ignore_eos=True) == expected
    assert llm.engine.prefix_cache.hits == 16


@FEW
@pytest.mark.slow
def test_prompts_of_one_call_share_their_prefix(folder):
    llm = LLM.load(
        folder,
        **EXACT,
        enable_prefix_caching=True,
        pagedattn_tokens_per_page=4,
        max_target_length=64,
    )
    completions = llm.generate([list(range(5, 25))] * 3, 4, ignore_eos=True)
    assert completions[0] == completions[1] == completions[2]
    assert llm.engine.prefix_cache.hits == 2 * 16


@FEW
@pytest.mark.slow
def test_limits_and_invalid_values(llm):
    requests = [
        new_request([5, 6], 4, ignore_eos=True),
        new_request([5, 6], 1 << 36),
        new_request([5, "x"], 4),
        new_request([5] * 9, 2.5),
        GenerationRequest(None),
    ]
    completions = sorted(llm.completions(requests), key=lambda completion: completion.index)
    assert [completion.finish_reason for completion in completions] == ["length", *["error"] * 4]
    assert "exceed" in completions[1].error
    assert "a prompt is text or token ids, whole numbers, not [5, 'x']" in completions[2].error
    assert "not None" in completions[4].error
    assert "must be a whole number" in completions[3].error
    everything = llm.generate([5, 6], 4, temperature=1.0, top_k=1 << 40, seed=-1, ignore_eos=True)
    assert everything == llm.generate([[5, 6]], 4, temperature=1.0, seed=-1, ignore_eos=True)[0]
    alone = llm.generate(np.array([5, 6]), 4, temperature=1.0, seed=-1, ignore_eos=True)
    assert alone.tolist() == everything
    assert len(llm.generate([[5], [6]], 2, temperature=1.0, seed=-1, ignore_eos=True)) == 2
    with pytest.raises(UserError, match="has its own params: put max_new_tokens into them"):
        next(llm.stream(GenerationRequest("w5"), max_new_tokens=4))


@FEW
def test_closed_stream_frees_its_slot(llm):
    stream = llm.stream("w5", max_new_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.engine.prefix_cache.pool.num_referenced == 0
    assert len(list(llm.stream("w5", max_new_tokens=4, ignore_eos=True))) > 0


@pytest.mark.slow
def test_warm_up_compiles_what_is_needed(folder):
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 8, "per_device_batch_size": 2}
    llm = LLM.load(folder, **EXACT, **sizes, enable_model_warmup=True)
    assert min(num_compiled(llm)) > 0
    for temperature in (0.0, 1.0):
        if temperature:
            llm.warm_up(SamplingParams(temperature=temperature))
        compiled = num_compiled(llm)
        requests = [
            new_request([5] * 8, 4, temperature=temperature, ignore_eos=True),
            new_request([6] * 3, 20, temperature=temperature, ignore_eos=True),
        ]
        list(llm.completions(iter(requests)))
        assert num_compiled(llm) == compiled


@pytest.fixture
def compilation_cache(tmp_path, monkeypatch):
    """A folder of compiled programs for one test, which takes even small ones."""
    flags = (startup.FOLDER, startup.ENABLED, "jax_persistent_cache_min_compile_time_secs")
    values = {flag: getattr(jax.config, flag) for flag in flags}
    monkeypatch.setattr(startup, "MIN_COMPILE_SECONDS", 0)
    yield tmp_path
    for flag, value in values.items():
        jax.config.update(flag, value)
    jax_cache.reset_cache()


@pytest.mark.slow
def test_second_warm_up_takes_its_programs_from_the_cache(
    folder, compilation_cache, monkeypatch, caplog
):
    monkeypatch.setattr(LOGGER, "propagate", True)
    reports = []
    monkeypatch.setattr(progress, "report", reports.append)
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 8, "per_device_batch_size": 2}
    counts = []
    for _ in range(2):
        reports.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "maxtext"):
            LLM.load(
                folder,
                **EXACT,
                **sizes,
                enable_model_warmup=True,
                jax_cache_dir=str(compilation_cache),
            )
        *_, last = (record for record in caplog.records if record.msg.startswith("warm-up: "))
        counts.append((last.args[0], last.args[2]))
        steps = len(reports) - 1
        assert reports == [*(f"warm-up {step + 1} of {steps}" for step in range(steps)), ""]
    (programs, first_hits), (again, second_hits) = counts
    assert programs == again > 0
    assert second_hits >= programs > first_hits


def num_compiled(llm):
    return [program._cache_size() for program in (llm.programs.prefill, llm.programs.decode)]


@pytest.mark.slow
def test_warm_up_compiles_programs_for_subsets_of_the_slots(folder, monkeypatch):
    """As on a GPU, where two numbers of decode steps are two programs."""
    build = replace(REFERENCE, platform="gpu", num_devices=2)
    monkeypatch.setattr("maxtext.inference.llm.inference_context", lambda config, rules: build)
    monkeypatch.setattr("maxtext.inference.engine.layout.MIN_DECODE_ROWS", 1)
    monkeypatch.setattr("maxtext.inference.engine.engine.STEP_SECONDS", 100.0)
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 8, "per_device_batch_size": 4}
    pages = {"attention": "paged", "pagedattn_tokens_per_page": 8, "pagedattn_num_pages": 16}
    llm = LLM.load(folder, **{**EXACT, **pages}, **sizes, enable_model_warmup=True)
    compiled = llm.programs.decode._cache_size()
    for count in (1, 2, 4):
        list(
            llm.completions(
                iter([new_request([count] * 8, 20, ignore_eos=True) for _ in range(count)])
            )
        )
    assert compiled >= 6  # two numbers of steps for 1, 2 and 4 slots
    assert llm.programs.decode._cache_size() == compiled


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up_where_prompts_share_rows(folder, monkeypatch):
    """As on a GPU, whatever the number of requests that arrive together, and their lengths."""
    build = replace(REFERENCE, platform="gpu", num_devices=2)
    monkeypatch.setattr("maxtext.inference.llm.inference_context", lambda config, rules: build)
    monkeypatch.setattr(Executor, "supports_packing", True)
    packed_shapes = ((16, 3), (32, 3), (64, 3), (64, 7))
    monkeypatch.setattr("maxtext.inference.engine.shapes.PACKED_SHAPES", packed_shapes)
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 24, "per_device_batch_size": 6}
    pages = {"attention": "paged", "pagedattn_tokens_per_page": 8, "pagedattn_num_pages": 24}
    llm = LLM.load(folder, **{**EXACT, **pages}, **sizes, enable_model_warmup=True)
    compiled = num_compiled(llm)
    assert compiled[0] == len(packed_shapes)
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 6, 9):
        prompts = [[7] * int(random.integers(1, 24)) for _ in range(count)]
        requests = [new_request(prompt, 8, ignore_eos=True) for prompt in prompts]
        list(llm.completions(iter(requests)))
    assert num_compiled(llm) == compiled


@pytest.mark.slow
def test_save_and_load_again(llm, folder, ids, tmp_path):
    """A native folder, and from that a Hugging Face folder with the same bits and assets."""
    from safetensors.numpy import load_file

    llm.save(tmp_path / "native")
    assert (tmp_path / "native" / "hugging_face" / "tokenizer.json").exists()
    again = LLM.load(tmp_path / "native", scan_layers=False, **EXACT)
    np.testing.assert_allclose(again.logits(ids), llm.logits(ids), atol=1e-5)
    assert again.generate("w5 w9", max_new_tokens=2) == llm.generate("w5 w9", max_new_tokens=2)
    again.save_hf(tmp_path / "hf")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert (tmp_path / "hf" / "tokenizer_config.json").exists()


def test_save_hf_with_dtype(llm, tmp_path):
    llm.save_hf(tmp_path / "half", dtype="bfloat16")
    hf_model = pytest.importorskip("transformers").LlamaForCausalLM.from_pretrained(
        tmp_path / "half"
    )
    assert {parameter.dtype for parameter in hf_model.parameters()} == {torch.bfloat16}


def test_random_weights_of_a_named_model(tmp_path):
    sizes = {
        "base_emb_dim": 32,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 1,
        "head_dim": 16,
        "base_mlp_dim": 48,
        "base_num_decoder_layers": 2,
        "vocab_size": 70,
        "override_model_config": True,
    }
    llm = LLM.load("qwen3-0.6b", **sizes, **EXACT)
    logits = np.asarray(llm.logits([[1, 2, 3]]))
    assert logits.shape == (1, 3, 70)
    llm.save_hf(tmp_path / "qwen")
    hf_model = pytest.importorskip("transformers").Qwen3ForCausalLM.from_pretrained(
        tmp_path / "qwen"
    )
    np.testing.assert_allclose(logits, hf_logits(hf_model.eval(), [[1, 2, 3]]), atol=1e-5)


@pytest.mark.slow
def test_on_several_devices(llm, folder, ids):
    """On a mesh of eight devices, the logits and tokens are the same."""
    script = (
        "import sys, json, numpy as np; from maxtext import LLM\n"
        "ids = np.array(json.loads(sys.argv[2]))\n"
        "llm = LLM.load(sys.argv[1], dtype='float32', weight_dtype='float32',"
        " matmul_precision='highest', attention='dot_product', ici_fsdp_parallelism=4,"
        " ici_tensor_parallelism=2)\n"
        "weight = llm.weights['layers'][0]['blocks'][0][0]['mlp']['wo']['weight']\n"
        "assert weight.addressable_shards[0].data.size * 8 == weight.size\n"
        "out = llm.generate(ids, 4, ignore_eos=True).tolist()\n"
        "print(json.dumps({'logits': np.asarray(llm.logits(ids)).tolist(), 'tokens': out}))\n"
    )
    args = (str(folder), json.dumps(ids.tolist()))
    done = run_python("-c", script, *args, environment=cpu_devices(8))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(result["logits"], llm.logits(ids), atol=1e-5)
    assert result["tokens"] == llm.generate(ids, 4, ignore_eos=True).tolist()


BAD_CALLS = {
    "an id beyond the vocabulary": (
        lambda llm: llm.logits([[5, 61]]),
        "token id 61 is outside the vocabulary, 0 to 60",
    ),
    "a negative id": (lambda llm: llm.generate(np.array([[-3]])), "token id -3 is outside"),
    "numbers with fractions": (lambda llm: llm.logits([[0.5]]), "must be whole numbers"),
    "no ids": (lambda llm: llm.logits([]), "must be whole numbers"),
    "an empty prompt": (lambda llm: llm.generate([[]]), "the prompt is empty"),
    "no new tokens": (
        lambda llm: llm.generate("w4", max_new_tokens=0),
        "max_new_tokens=0 must be a whole number of at least 1",
    ),
    "top_p": (
        lambda llm: llm.generate("w4", temperature=1.0, top_p=0.0),
        "top_p=0.0 must be above 0",
    ),
    "top_k": (
        lambda llm: llm.generate("w4", temperature=1.0, top_k=-2),
        "top_k=-2 must be at least 0",
    ),
    "temperature": (
        lambda llm: llm.generate("w4", temperature=-1.0),
        "temperature=-1.0 must be a number from 0 to 1e\\+30",
    ),
    "a bias outside the vocabulary": (
        lambda llm: llm.generate("w4", logit_bias={61: 1.0}),
        "logit_bias has token 61, which is outside the vocabulary, 0 to 60",
    ),
    "a stop token outside the vocabulary": (
        lambda llm: llm.generate("w4", stop_token_ids=[10**30]),
        "stop_token_ids has token 1000000000000000000000000000000, which is outside",
    ),
    "more than fits": (
        lambda llm: llm.generate("w4", max_new_tokens=4, min_tokens=5),
        "min_tokens=5 exceeds max_new_tokens=4",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_invalid_calls(llm, name):
    call, sentence = BAD_CALLS[name]
    with pytest.raises(UserError, match=sentence):
        call(llm)


def test_load_errors(folder, tmp_path):
    with pytest.raises(
        ConfigError, match="'no-such-model' is neither a folder nor the name of a model"
    ):
        LLM.load("no-such-model")
    with pytest.raises(UserError, match="has no config.json"):
        LLM.load(tmp_path)
    with pytest.raises(ConfigError, match="vocab_size=99 .* differs from 61 in the model's file"):
        LLM.load(folder, vocab_size=99)
    with pytest.raises(ConfigError, match="learning_rate is for training and would do nothing"):
        LLM.load(folder, learning_rate=1e-4)
    llm = LLM.load(folder, **EXACT)
    llm.checkpoint = None
    with pytest.raises(UserError, match="came without a tokenizer"):
        llm.generate("hello")
