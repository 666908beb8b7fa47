"""The Python door against transformers: scores, continuations, text, folders, several devices, and
what is refused.
"""

import json
import os
import subprocess
import sys
from itertools import zip_longest

import numpy as np
import pytest

from maxtext import LLM
from maxtext.common.errors import ConfigError, UserError
from maxtext.inference import Ask
from maxtext.inference.engine import Engine
from tests.compiling import FAST_COMPILE_FLAGS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("quick_programs")
FEW = pytest.mark.usefixtures("few_programs")

EXACT = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}


def their_logits(model, rows):
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.asarray(rows)), use_cache=False).logits.numpy()


def their_greedy(model, row, count):
    row = [int(token) for token in row]
    for _ in range(count):
        row.append(int(their_logits(model, [row])[0, -1].argmax()))
    return row[-count:]


def test_logits(llm, model, ids):
    expected = their_logits(model, ids)
    np.testing.assert_allclose(llm.logits(ids), expected, atol=1e-5)
    np.testing.assert_allclose(llm.logits(ids[0]), expected[0], atol=1e-5)
    np.testing.assert_allclose(llm.logits(ids[:1].tolist()), expected[:1], atol=1e-5)


def test_greedy_ids(llm, model, ids):
    got = llm.generate(ids, max_new_tokens=6, ignore_eos=True)
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [their_greedy(model, row, 6) for row in ids]


def test_prompts_of_mixed_lengths(llm, model, ids):
    prompts = [ids[0, :3].tolist(), ids[1].tolist(), ids[2, :1].tolist()]
    assert llm.generate(prompts, 5, ignore_eos=True) == [
        their_greedy(model, prompt, 5) for prompt in prompts
    ]


@FEW
def test_a_row_ends_with_the_end_of_sequence(folder, model, ids, tmp_path):
    """The third greedy token of the first row is declared to be the end, for it and for whoever
    says it later.
    """
    free = [their_greedy(model, row, 6) for row in ids]
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
    """A prompt gets the <s> that the tokenizer puts before it; the answer is what follows, without
    special tokens.
    """
    words = their_greedy(model, [0, 5, 9], 4)
    assert 1 not in words
    answer = "".join(f" w{word}" for word in words if word > 2)
    assert answer
    assert llm.generate("w5 w9", max_new_tokens=4) == answer
    assert llm.generate(["w5 w9", "w7"], max_new_tokens=4)[0] == answer


@pytest.mark.slow
def test_samples_follow_the_distribution(llm, model, ids):
    """One token of 4000 rows with the same prompt against softmax(logits / T), by chi square at 1
    in 10^4.
    """
    from scipy import stats

    prompt = ids[:1]
    logits = their_logits(model, prompt)[0, -1].astype(np.float64)
    for options, kept in (({}, len(logits)), ({"top_k": 5}, 5), ({"top_p": 0.6}, None)):
        scaled = np.exp((logits - logits.max()) / 1.5)
        scaled /= scaled.sum()
        order = np.argsort(-scaled)
        if kept is None:
            kept = int(np.searchsorted(np.cumsum(scaled[order]), 0.6) + 1)
        expected = np.zeros_like(scaled)
        expected[order[:kept]] = scaled[order[:kept]] / scaled[order[:kept]].sum()
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
def test_the_seed_decides(llm, ids):
    one, same, other = (
        llm.generate(ids, 8, temperature=2.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


@FEW
def test_streams_and_stops(llm):
    """Pieces make the text; a stop ends it before the text that it is."""
    whole = llm.generate("w5 w9", max_new_tokens=12, ignore_eos=True)
    pieces = list(llm.stream("w5 w9", max_new_tokens=12, ignore_eos=True))
    assert "".join(pieces) == whole
    word = whole.split()[2]
    before = whole[: whole.index(f" {word}")]
    assert llm.generate("w5 w9", max_new_tokens=12, ignore_eos=True, stop=[f" {word}"]) == before
    (answer,) = llm.answers([Ask("w5 w9", 12, stop=(f" {word}",), ignore_eos=True)])
    assert (answer.finished, answer.text) == ("stop", before)
    assert (
        sum(token > 2 for token in answer.ids) == before.count(" w") + 1
    )  # the others are not shown
    again = list(
        llm.stream("w5 w9", max_new_tokens=12, ignore_eos=True)
    )  # the slot that was stopped is free
    assert again == pieces


@FEW
@pytest.mark.slow
def test_a_bad_ask_is_answered_and_the_others_go_on(llm):
    good = Ask([5, 6], 4, ignore_eos=True)
    asks = [
        good,
        Ask([], 4),
        Ask([5, 61], 4),
        Ask("w5", 0),
        Ask([5] * 127, 4, ignore_eos=True),
        good,
    ]
    for given in (iter(asks), asks):
        answers = sorted(llm.answers(given), key=lambda answer: answer.index)
        assert [answer.index for answer in answers] == list(range(6))
        assert [answer.finished for answer in answers] == [
            "length",
            "error",
            "error",
            "error",
            *["length"] * 2,
        ]
        assert answers[0].ids == answers[5].ids
        assert answers[0].text == answers[5].text
    errors = [answer.error or "" for answer in answers]
    assert "empty" in errors[1]
    assert "token id 61" in errors[2]
    assert "max_new_tokens=0" in errors[3]


@FEW
def test_streams_side_by_side(llm):
    """Each has a scheduler of its own while another runs."""
    prompts = ("w5 w9", "w7")
    expected = [llm.generate(prompt, max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    streams = [llm.stream(prompt, max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    pieces = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(each) for each in zip(*pieces, strict=True)] == expected


@FEW
@pytest.mark.slow
def test_an_interrupted_step_leaves_nothing_behind(folder, monkeypatch):
    """What was believed to be in the caches, and is not, is not learned."""
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
        patch.setattr(Engine, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, 6, ignore_eos=True)
    for _ in range(2):
        assert llm.generate(prompt, 6, ignore_eos=True) == expected
    assert llm.last_scheduler[1].pages.hits == 16


@FEW
def test_prompts_that_come_together_share_what_they_begin_with(folder):
    llm = LLM.load(
        folder,
        **EXACT,
        enable_prefix_caching=True,
        pagedattn_tokens_per_page=4,
        max_target_length=64,
    )
    answers = llm.generate([list(range(5, 25))] * 3, 4, ignore_eos=True)
    assert answers[0] == answers[1] == answers[2]
    assert llm.last_scheduler[1].pages.hits == 2 * 16


@FEW
@pytest.mark.slow
def test_limits_and_odd_numbers(llm):
    asks = [
        Ask([5, 6], 4, ignore_eos=True),
        Ask([5, 6], 1 << 36),
        Ask([5, "x"], 4),
        Ask([5] * 9, 2.5),
        Ask(None),
    ]
    answers = sorted(llm.answers(asks), key=lambda answer: answer.index)
    assert [answer.finished for answer in answers] == ["length", *["error"] * 4]
    assert "do not fit into" in answers[1].error
    assert "a prompt is text or whole numbers, token ids, not [5, 'x']" in answers[2].error
    assert "not None" in answers[4].error
    assert "must be a whole number" in answers[3].error
    everything = llm.generate([5, 6], 4, temperature=1.0, top_k=1 << 40, seed=-1, ignore_eos=True)
    assert everything == llm.generate([[5, 6]], 4, temperature=1.0, seed=-1, ignore_eos=True)[0]
    alone = llm.generate(np.array([5, 6]), 4, temperature=1.0, seed=-1, ignore_eos=True)
    assert alone.tolist() == everything
    assert len(llm.generate([[5], [6]], 2, temperature=1.0, seed=-1, ignore_eos=True)) == 2
    with pytest.raises(UserError, match="an Ask says all: put max_new_tokens into it"):
        next(llm.stream(Ask("w5"), max_new_tokens=4))


@FEW
def test_a_stream_that_is_left_frees_its_slot(llm):
    stream = llm.stream("w5", max_new_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.last_scheduler[1].pages.held == 0
    assert len(list(llm.stream("w5", max_new_tokens=4, ignore_eos=True))) > 0


def test_warm_up_compiles_what_is_needed(folder):
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 8, "per_device_batch_size": 2}
    llm = LLM.load(folder, **EXACT, **sizes, enable_model_warmup=True)
    compiled = [program._cache_size() for program in (llm.programs.prefill, llm.programs.decode)]
    list(llm.answers(iter([Ask([5] * 8, 4, ignore_eos=True), Ask([6] * 3, 20, ignore_eos=True)])))
    assert min(compiled) > 0
    assert [
        program._cache_size() for program in (llm.programs.prefill, llm.programs.decode)
    ] == compiled


@pytest.mark.slow
def test_warm_up_compiles_programs_for_some_of_the_slots(folder, monkeypatch):
    """As on a GPU, where blocks of two lengths are two programs."""
    for place in ("engine", "llm"):
        monkeypatch.setattr(f"maxtext.inference.{place}.platform", lambda rules: "gpu")
    monkeypatch.setattr("maxtext.inference.engine.LEAST_ROWS", 1)
    monkeypatch.setattr("maxtext.inference.scheduler.BLOCK_SECONDS", 100.0)
    sizes = {"max_target_length": 32, "max_prefill_predict_length": 8, "per_device_batch_size": 4}
    pages = {"attention": "paged", "pagedattn_tokens_per_page": 8, "pagedattn_num_pages": 16}
    llm = LLM.load(folder, **{**EXACT, **pages}, **sizes, enable_model_warmup=True)
    compiled = llm.programs.decode._cache_size()
    for count in (1, 2, 4):
        list(llm.answers(iter([Ask([count] * 8, 20, ignore_eos=True) for _ in range(count)])))
    assert compiled >= 6  # blocks of two lengths for 1, 2 and 4 slots
    assert llm.programs.decode._cache_size() == compiled


def test_save_and_load_again(llm, folder, ids, tmp_path):
    """Ours, scanned and unrolled; and from ours back to theirs, bit for bit, with what came
    along.
    """
    from safetensors.numpy import load_file

    llm.save(tmp_path / "ours")
    assert (tmp_path / "ours" / "hugging_face" / "tokenizer.json").exists()
    again = LLM.load(tmp_path / "ours", scan_layers=False, **EXACT)
    np.testing.assert_allclose(again.logits(ids), llm.logits(ids), atol=1e-5)
    assert again.generate("w5 w9", max_new_tokens=2) == llm.generate("w5 w9", max_new_tokens=2)
    again.save_hf(tmp_path / "theirs")
    before, after = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "theirs")
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert (tmp_path / "theirs" / "tokenizer_config.json").exists()


def test_a_dtype_for_hugging_face(llm, tmp_path):
    llm.save_hf(tmp_path / "half", dtype="bfloat16")
    their = pytest.importorskip("transformers").LlamaForCausalLM.from_pretrained(tmp_path / "half")
    assert {parameter.dtype for parameter in their.parameters()} == {torch.bfloat16}


def test_random_weights_of_a_named_model(tmp_path):
    sizes = {"base_emb_dim": 32, "base_num_query_heads": 2, "base_num_kv_heads": 1, "head_dim": 16, "base_mlp_dim": 48,
             "base_num_decoder_layers": 2, "vocab_size": 70, "override_model_config": True}  # fmt: skip
    llm = LLM.load("qwen3-0.6b", **sizes, **EXACT)
    logits = np.asarray(llm.logits([[1, 2, 3]]))
    assert logits.shape == (1, 3, 70)
    llm.save_hf(tmp_path / "qwen")
    their = pytest.importorskip("transformers").Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen")
    np.testing.assert_allclose(logits, their_logits(their.eval(), [[1, 2, 3]]), atol=1e-5)


@pytest.mark.slow
def test_on_several_devices(llm, folder, ids):
    """Split over a mesh of eight, the same scores and tokens."""
    script = (
        "import sys, json, numpy as np; from maxtext import LLM\n"
        "ids = np.array(json.loads(sys.argv[2]))\n"
        "llm = LLM.load(sys.argv[1], dtype='float32', weight_dtype='float32', matmul_precision='highest',"
        " attention='dot_product', ici_fsdp_parallelism=4, ici_tensor_parallelism=2)\n"
        "kernel = llm.weights['layers'][0]['blocks'][0][0]['mlp']['wo']['kernel']\n"
        "assert kernel.addressable_shards[0].data.size * 8 == kernel.size\n"
        "out = llm.generate(ids, 4, ignore_eos=True).tolist()\n"
        "print(json.dumps({'logits': np.asarray(llm.logits(ids)).tolist(), 'tokens': out}))\n"
    )
    quick = FAST_COMPILE_FLAGS
    environment = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {quick}",
        "JAX_PLATFORMS": "cpu",
    }
    words = [sys.executable, "-c", script, str(folder), json.dumps(ids.tolist())]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | environment, check=False
    )
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
        lambda llm: llm.generate("w4", temperature=1.0, top_k=-1),
        "top_k=-1 must be at least 0",
    ),
    "temperature": (
        lambda llm: llm.generate("w4", temperature=-1.0),
        "temperature=-1.0 must be a number from 0 to 1e\\+30",
    ),
    "top_k of nothing": (lambda llm: llm.generate("w4", top_k=3), "temperature=0 draws nothing"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_is_refused(llm, name):
    call, sentence = BAD_CALLS[name]
    with pytest.raises(UserError, match=sentence):
        call(llm)


def test_what_cannot_be_loaded(folder, tmp_path):
    with pytest.raises(
        ConfigError, match="'no-such-model' is neither a folder nor the name of a model"
    ):
        LLM.load("no-such-model")
    with pytest.raises(UserError, match="has no config.json"):
        LLM.load(tmp_path)
    with pytest.raises(ConfigError, match="vocab_size=99 .* differs from 61 in the model's file"):
        LLM.load(folder, vocab_size=99)
    llm = LLM.load(folder, **EXACT)
    llm.checkpoint = None
    with pytest.raises(UserError, match="came without a tokenizer"):
        llm.generate("hello")
