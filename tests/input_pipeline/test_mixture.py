"""Mixtures: which documents training and evaluation read, against a naive loop over the parts."""

import logging
from collections import Counter

import pytest

from maxtext.input_pipeline import ShardSpec, Split
from maxtext.input_pipeline.pipeline import documents_read
from tests.support.batches import make_iterator

SMALL, LARGE = 8, 40


@pytest.fixture
def parts(write):
    texts = {
        name: [f"{name}{number:02}" for number in range(count)]
        for name, count in (("a", SMALL), ("b", LARGE))
    }
    return texts, {name: write(*documents, name=name) for name, documents in texts.items()}


def read(config, split, count=1):
    """How often each document is read, by all streams; a row has one document of three letters."""
    return Counter(
        bytes(int(token) - 3 for token in row if token > 2).decode()
        for index in range(count)
        for batch in make_iterator(config, split, ShardSpec(1, index=index, count=count))
        for row in batch["targets"]
    )


@pytest.mark.parametrize("weights", [(1, 1), (1, 5), (0.9, 0.1), (3, 1)])
@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_reads_every_document_once(make_config, parts, weights, count):
    texts, folders = parts
    files = ";".join(
        f"{folders[name]},{weight}" for name, weight in zip(texts, weights, strict=True)
    )
    config = make_config(grain_eval_files=files, packing=False)
    assert read(config, Split.EVAL, count) == Counter(texts["a"] + texts["b"])


@pytest.mark.parametrize("weights", [(1, 1), (1, 5), (0.9, 0.1), (3, 1)])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_all_exhausted_reads_every_document_and_keeps_the_weights(
    make_config, parts, weights, epochs, shuffle
):
    texts, folders = parts
    files = ";".join(
        f"{folders[name]},{weight}" for name, weight in zip(texts, weights, strict=True)
    )
    config = make_config(
        grain_train_files=files,
        packing=False,
        num_epoch=epochs,
        enable_data_shuffling=shuffle,
        mixture_stopping_strategy="all_exhausted",
    )
    seen = read(config, Split.TRAIN)
    assert set(seen) == {*texts["a"], *texts["b"]}
    assert min(seen.values()) == epochs
    for name in texts:  # each part is read from its beginning to its end, again and again
        assert (
            max(seen[text] for text in texts[name]) - min(seen[text] for text in texts[name]) <= 1
        )
    share = sum(seen[text] for text in texts["a"]) / seen.total()
    assert share == pytest.approx(weights[0] / sum(weights), abs=1.5 / seen.total() + 0.01)


def test_first_exhausted_logs_unread_documents(make_config, parts, caplog):
    texts, folders = parts
    files = f"{folders['a']},1;{folders['b']},1"
    with caplog.at_level(logging.INFO):
        seen = read(make_config(grain_train_files=files, packing=False), Split.TRAIN)
    assert seen == Counter(texts["a"] + texts["b"][:SMALL])
    assert "the mixture has 8 + 40 documents and ends after 16" in caplog.text
    assert "its parts are read 1, 0.2 times; all_exhausted would" in caplog.text


def test_documents_read():
    assert documents_read([8, 40], [1, 1], 1, "first_exhausted") == [8, 8]
    assert documents_read([8, 40], [1, 1], 1, "all_exhausted") == [40, 40]
    assert documents_read([10, 10], [1, 3], 2, "all_exhausted") == [20, 60]
