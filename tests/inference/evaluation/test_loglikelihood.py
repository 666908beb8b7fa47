"""Log-likelihoods and perplexities, compared with transformers."""

import json
import math

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.inference.engine import shapes
from maxtext.inference.evaluation.loglikelihood import (
    TokenSpan,
    batch_indices,
    compute_loglikelihoods,
)
from maxtext.inference.evaluation.perplexity import (
    Windows,
    compute_perplexity,
    make_windows,
    open_texts,
    read_texts,
)
from tests.inference.conftest import WORDS

torch = pytest.importorskip("torch")


def hf_logprobs(model, ids):
    """[S, V], of what follows each token."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].double(), -1).numpy()


def test_equal_those_of_transformers_in_the_order_of_the_spans(llm, model):
    rng = np.random.default_rng(1)
    lengths = [5, 40, 2, 17, 16, 33, 100, 3, 9]
    spans = [
        TokenSpan(rng.integers(3, len(WORDS), length), int(rng.integers(1, length)))
        for length in lengths
    ]
    progress = []
    results = compute_loglikelihoods(llm, spans, lambda *counts: progress.append(counts))
    for span, result in zip(spans, results, strict=True):
        rows = hf_logprobs(model, span.token_ids)
        positions = np.arange(span.start, len(span.token_ids))
        expected = rows[positions - 1, span.token_ids[positions]].sum()
        assert result.logprob == pytest.approx(expected, abs=2e-4)
        assert result.is_greedy == all(rows[positions - 1].argmax(-1) == span.token_ids[positions])
    assert progress[-1] == (len(spans), len(spans))


def test_a_greedy_continuation_is_greedy(llm, model):
    ids = [0, 5, 9]
    for _ in range(4):
        ids.append(int(hf_logprobs(model, ids)[-1].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % len(WORDS)]
    results = compute_loglikelihoods(llm, [TokenSpan(ids, 3), TokenSpan(wrong, 3)])
    assert [result.is_greedy for result in results] == [True, False]


def test_choices_of_the_last_token_share_a_row(llm, model, monkeypatch):
    context = [0, 7, 8, 9, 10]
    spans = [TokenSpan([*context, choice], 3 + choice % 3) for choice in (20, 3, 44, 20)]
    spans.append(TokenSpan([0, 7, 9], 1))
    program, shapes_of_inputs = llm.programs.target_logprobs, []

    def record(weights, token_ids, *arrays):
        shapes_of_inputs.append(token_ids.shape)
        return program(weights, token_ids, *arrays)

    monkeypatch.setitem(llm.programs.__dict__, "target_logprobs", record)
    results = compute_loglikelihoods(llm, spans)
    assert shapes_of_inputs == [(2, 16)]
    for span, result in zip(spans, results, strict=True):
        rows = hf_logprobs(model, span.token_ids)
        positions = np.arange(span.start, len(span.token_ids))
        expected = rows[positions - 1, np.array(span.token_ids)[positions]].sum()
        assert result.logprob == pytest.approx(expected, abs=2e-4)


def test_batches_are_sorted_by_length_and_have_few_shapes():
    lengths = np.random.default_rng(0).integers(1, 1000, 5000).tolist()
    batches = list(batch_indices(lengths))
    order = [lengths[index] for batch in batches for index in batch]
    assert order == sorted(lengths, reverse=True)
    batch_shapes = {
        (shapes.next_power_of_two(len(batch)), shapes.row_tokens(lengths[batch[0]]))
        for batch in batches
    }
    assert len(batch_shapes) <= 13  # two a power of two from 16 to 1024, and a last batch
    assert all(rows * tokens <= shapes.MAX_PREFILL_TOKENS for rows, tokens in batch_shapes)


def test_a_token_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(UserError, match="outside the vocabulary"):
        compute_loglikelihoods(llm, [TokenSpan([1, len(WORDS)], 1)])


def hf_nll(model, ids, window, stride):
    """(sum, number of tokens), by the loop of transformers' guide to perplexity."""
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        part = ids[begin:end]
        labels = torch.tensor([part])
        labels[:, : len(part) - (end - previous_end)] = -100
        if len(part) > 1:
            with torch.no_grad():
                loss = model(torch.tensor([part]), labels=labels).loss.double().item()
            tokens = int((labels[:, 1:] != -100).sum())
            total, count = total + (loss * tokens if tokens else 0.0), count + tokens
        previous_end = end
        if end == len(ids):
            break
    return total, count


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 5), (16, 1), (128, 64)])
def test_perplexity_equals_transformers(llm, model, window, stride):
    words = np.random.default_rng(2).choice(WORDS[3:], 90).tolist()
    texts = [" ".join(words[:70]), " ".join(words[70:]), ""]
    expected = [
        hf_nll(model, [0, *map(WORDS.index, text.split())], window, stride) for text in texts
    ]
    nll, tokens = (sum(values) for values in zip(*expected, strict=True))
    record = compute_perplexity(llm, texts, Windows(window, stride), None).record()
    num_bytes = sum(map(len, texts))
    assert (record["tokens"], record["bytes"]) == (tokens, num_bytes)
    assert record["nll_per_token"] == pytest.approx(nll / tokens, abs=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert record["bits_per_byte"] == pytest.approx(nll / math.log(2) / num_bytes, abs=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_windows_count_each_token_at_most_once(stride):
    counts = np.zeros(30, int)
    for span in Windows(8, stride).spans(np.arange(30)):
        counts[span.token_ids[span.start :]] += 1
        assert len(span.token_ids) <= 8
    uncounted = [0] if stride < 8 else [0, 8, 16, 24]
    assert np.flatnonzero(counts == 0).tolist() == uncounted
    assert counts.max() == 1


def test_texts_of_json_lines(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("w3 w4", "é")))
    assert list(read_texts(open_texts(str(path)))) == ["w3 w4", "é"]
    path.write_text('{"text": 5}\n')
    with pytest.raises(UserError, match="line 1.*int"):
        list(read_texts(open_texts(str(path))))
    path.write_text('{"title": "x"}\n')
    with pytest.raises(ConfigError, match="text"):
        open_texts(str(path))


def test_a_text_with_an_unknown_suffix_is_plain(tmp_path):
    path = tmp_path / "words.py"
    path.write_text("w3\r\n")
    assert list(read_texts(open_texts(str(path)))) == ["w3\r\n"]
    with pytest.raises(ConfigError, match="does not exist"):
        open_texts(str(tmp_path / "none.txt"))


def test_a_text_without_a_pair_of_tokens_is_refused(llm):
    with pytest.raises(UserError, match="too short"):
        compute_perplexity(llm, [""], Windows(8, 8), None)


def test_windows_fit_the_model():
    assert make_windows(64, None, None) == Windows(64, 64)
    assert make_windows(64, 32, None) == Windows(32, 32)
    with pytest.raises(ConfigError, match="max_target_length=64"):
        make_windows(64, 65, None)
    with pytest.raises(ConfigError, match="--stride 33"):
        make_windows(64, 32, 33)
