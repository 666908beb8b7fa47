"""Trained tokenizers open in the libraries, and sampling covers the corpus."""

from itertools import pairwise

import pytest

from maxtext.tokenizers import open_tokenizer
from maxtext.tokenizers.train import sample_texts, train_bpe, train_sentencepiece
from tests.tokenizers.tiny import VARIED_CORPUS

UNSEEN = "  Ωmega\tŽivot \n\n 12345 don't\r\n\0 ᚠ🧪 \u3000x "


def texts(documents, max_chars, column="text"):
    nbytes = sum(len(str(document[column]).encode()) for document in documents)
    return list(sample_texts(documents, column, nbytes, max_chars, lambda done: None))


def test_uses_all_text_of_a_small_corpus():
    documents = [{"text": text} for text in VARIED_CORPUS]
    assert texts(documents, 10**6) == VARIED_CORPUS


def test_samples_evenly():
    documents = [{"text": f"{index:04d}" * 50} for index in range(1000)]
    sampled = texts(documents, 20_000)
    assert sum(map(len, sampled)) == 20_000
    indices = [int(text[:4]) for text in sampled]
    assert indices == sorted(indices)
    assert max(b - a for a, b in pairwise([0, *indices, 1000])) <= 11


def test_long_documents_do_not_crowd_out_short_ones():
    documents = [{"text": "a" * 90_000}, {"text": "b" * 100}, {"text": "c" * 50_000}]
    sampled = "".join(texts(documents, 60_000))
    assert len(sampled) == 60_000
    assert sampled.count("b") == 100
    assert abs(sampled.count("a") - sampled.count("c")) <= 20_000, "at most an excerpt apart"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "sentencepiece bpe"])
def test_training_is_deterministic_and_the_vocabulary_complete(kind, tmp_path):
    def train(name):
        if kind == "bpe":
            return train_bpe(VARIED_CORPUS, 350, tmp_path / name), tmp_path / name
        path = tmp_path / f"{name}.model"
        return train_sentencepiece(VARIED_CORPUS, 350, path, kind.split()[-1]), path

    (size, first), (_, second) = train("a"), train("b")
    assert size == 350
    files = [path / "tokenizer.json" if kind == "bpe" else path for path in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = open_tokenizer(str(first))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        0,
        1,
        2,
        350,
    )
    assert tokenizer.decode(tokenizer.encode(UNSEEN)) == UNSEEN
    text = VARIED_CORPUS[0]
    assert len(tokenizer.encode(text)) < 0.75 * len(text.encode()), "it compresses"
    assert tokenizer.encode_prompt("x")[0] == 1


@pytest.mark.slow
def test_ids_equal_transformers_on_the_same_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    train_bpe(VARIED_CORPUS, 350, tmp_path)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    assert hf_tokenizer(UNSEEN)["input_ids"] == tokenizer.encode_prompt(UNSEEN)
    assert hf_tokenizer(UNSEEN, add_special_tokens=False)["input_ids"] == tokenizer.encode(UNSEEN)
    ids = (hf_tokenizer.pad_token_id, hf_tokenizer.bos_token_id, hf_tokenizer.eos_token_id)
    assert ids == (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
