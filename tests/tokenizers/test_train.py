"""Vocabularies of our own making, opened by the libraries; and which text they are made from."""

import pytest

from maxtext.tokenizers import open_tokenizer
from maxtext.tokenizers.train import sample, train_bpe, train_sentencepiece
from tests.tokenizers.tiny import CORPUS

UNSEEN = "  Ωmega\tŽivot \n\n 12345 don't\r\n\0 ᚠ🧪 \u3000x "


def texts(documents, max_chars, column="text"):
    nbytes = sum(len(str(one[column]).encode()) for one in documents)
    return list(sample(documents, column, nbytes, max_chars, lambda done: None))


def test_all_text_is_used_when_there_is_room():
    documents = [{"text": text} for text in CORPUS]
    assert texts(documents, 10**6) == CORPUS


def test_a_sample_comes_from_everywhere():
    documents = [{"text": f"{place:04d}" * 50} for place in range(1000)]
    found = texts(documents, 20_000)
    assert sum(map(len, found)) == 20_000
    places = [int(text[:4]) for text in found]
    assert places == sorted(places)
    assert max(b - a for a, b in zip([0, *places], [*places, 1000], strict=True)) <= 11


def test_long_documents_share_the_room_with_short_ones():
    documents = [{"text": "a" * 90_000}, {"text": "b" * 100}, {"text": "c" * 50_000}]
    found = "".join(texts(documents, 60_000))
    assert len(found) == 60_000
    assert found.count("b") == 100
    assert abs(found.count("a") - found.count("c")) <= 20_000, "no more than a share apart"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "sentencepiece bpe"])
def test_the_same_text_makes_the_same_vocabulary_that_knows_any_text(kind, tmp_path):
    def make(place):
        if kind == "bpe":
            return train_bpe(CORPUS, 350, place), place
        return train_sentencepiece(
            CORPUS, 350, place.with_suffix(".model"), kind.split()[-1]
        ), place.with_suffix(".model")

    (size, first), (_, second) = make(tmp_path / "a"), make(tmp_path / "b")
    assert size == 350
    files = [place / "tokenizer.json" if kind == "bpe" else place for place in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = open_tokenizer(str(first))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        0,
        1,
        2,
        350,
    )
    assert tokenizer.decode(tokenizer.encode(UNSEEN)) == UNSEEN
    seen = CORPUS[0]
    assert len(tokenizer.encode(seen)) < 0.75 * len(seen.encode()), "it has learned something"
    assert tokenizer.encode_prompt("x")[0] == 1


@pytest.mark.slow
def test_transformers_opens_the_folder_and_agrees(tmp_path):
    transformers = pytest.importorskip("transformers")
    train_bpe(CORPUS, 350, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(str(tmp_path))
    assert theirs(UNSEEN)["input_ids"] == ours.encode_prompt(UNSEEN)
    assert theirs(UNSEEN, add_special_tokens=False)["input_ids"] == ours.encode(UNSEEN)
    ids = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id)
    assert ids == (ours.pad_id, ours.bos_id, ours.eos_id)
