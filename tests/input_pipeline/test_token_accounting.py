"""Every token of real text is read exactly once, for each packing, against a naive loop over the
documents.
"""

import sysconfig
from collections import Counter
from itertools import chain, groupby, pairwise
from pathlib import Path

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.input_pipeline import Split
from maxtext.models.configuration import load
from tests.support.batches import make_train_iterator, open_data_streams, truncated_share

LENGTH, ROWS = 96, 6
TEXTS = [
    path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
]
# Paragraphs, of very different lengths; none is empty.
DOCUMENTS = [part for text in TEXTS for part in text.decode().split("\n\n") if part.strip()]


def pairs(document, truncate):
    """(input, target) by the definition of the byte tokenizer, with its begin and end tokens."""
    tokens = [1, *(byte + 3 for byte in document.encode()), 2]
    pairs = list(pairwise(tokens))
    return pairs[:LENGTH] if truncate else pairs


def naive(packing, truncate, epochs):
    """The segments of all rows: pieces of one document of at most LENGTH pairs, cut also where a
    row ends if they are put one after the other."""
    documents = [pairs(document, truncate) for document in DOCUMENTS] * epochs
    if packing != "concat_then_split":
        return Counter(
            tuple(document[start : start + LENGTH])
            for document in documents
            for start in range(0, len(document), LENGTH)
        )
    numbered = list(
        chain.from_iterable(
            ((number, pair) for pair in one) for number, one in enumerate(documents)
        )
    )
    rows = (numbered[start : start + LENGTH] for start in range(0, len(numbered), LENGTH))
    return Counter(
        tuple(pair for _, pair in segment)
        for row in rows
        for _, segment in groupby(row, key=lambda one: one[0])
    )


def segments(batches):
    for batch in batches:
        assert batch["inputs"].shape == (ROWS, LENGTH)
        for inputs, targets, numbers in zip(
            batch["inputs"], batch["targets"], batch["targets_segmentation"], strict=True
        ):
            for number in range(1, numbers.max() + 1):
                mask = numbers == number
                yield tuple(zip(inputs[mask].tolist(), targets[mask].tolist(), strict=True))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(
    ("packing", "streams"),
    [
        ("first_fit", 1),
        ("first_fit", 3),
        ("best_fit", 1),
        ("best_fit", 3),
        ("none", 3),
        ("concat_then_split", 1),
    ],
)
@pytest.mark.parametrize("split", Split)
def test_every_token_once(make_config, write, packing, streams, truncate, split):
    if split is Split.EVAL and streams > 1:
        pytest.skip("the same code as for one stream")
    folder = write(*DOCUMENTS)
    how = {"packing": False} if packing == "none" else {"grain_packing_type": packing}
    shuffle = packing != "concat_then_split"  # which document a row cuts depends on their order
    config = make_config(
        grain_train_files=folder,
        grain_eval_files=folder,
        max_target_length=LENGTH,
        use_truncation=truncate,
        enable_data_shuffling=shuffle,
        data_streams=streams,
        num_epoch=2,
        generate_padding_batch_train=True,
        grain_worker_count=0,
        grain_worker_count_eval=0,
        **how,
    )
    batches = open_data_streams(config, split, lambda step: ROWS, [ROWS])
    assert Counter(segments(batches)) == naive(packing, truncate, 2 if split is Split.TRAIN else 1)
    batches.close()


@pytest.fixture
def load_config(write):
    """The configuration of a run on one's own text, with nothing about long documents set."""
    folder = write(*(text.decode() for text in TEXTS))

    def load_overrides(*overrides):
        settings = [
            f"grain_train_files={folder}", "dataset_type=grain", "grain_file_type=text",
            "tokenizer_path=byte", "vocab_size=259", f"max_target_length={LENGTH}",
            "per_device_batch_size=1", "generate_padding_batch_train=true",
            "grain_worker_count=0", *overrides,
        ]  # fmt: skip
        return load(None, settings, environ={}, devices=Devices(1))

    return load_overrides


def count_pairs(texts, most=None):
    """n bytes with a begin and an end token have n + 1 (input, target) pairs."""
    return sum(min(len(text) + 1, most or len(text) + 1) for text in texts)


def test_pre_training_reads_every_token_of_long_documents_by_default(load_config):
    batches = make_train_iterator(load_config())
    read = sum(int((batch["targets_segmentation"] > 0).sum()) for batch in batches)
    assert read == count_pairs(TEXTS)


def test_share_that_truncation_drops(load_config):
    assert truncated_share(load_config()) is None
    share = truncated_share(load_config("use_truncation=true"))
    assert share == pytest.approx(1 - count_pairs(TEXTS, LENGTH) / count_pairs(TEXTS))
    assert share > 0.9


def test_share_of_a_mixture_counts_documents_by_weight(load_config, write):
    long, short = write("a" * 1000, name="long"), write("a" * 50, "b" * 50, name="short")
    mixture = f"{long},0.25;{short},0.75"
    config = load_config("use_truncation=true").model_copy(update={"grain_train_files": mixture})
    kept, total = 0.25 * LENGTH + 0.75 * 51, 0.25 * 1001 + 0.75 * 51
    assert truncated_share(config) == pytest.approx(1 - kept / total)


def test_a_run_that_truncated_does_not_resume_with_split_documents(load_config):
    """As one that was started by a version whose default was use_truncation=true."""
    before = make_train_iterator(load_config("use_truncation=true"))
    next(before)
    after = make_train_iterator(load_config())
    with pytest.raises(ConfigError, match="made with use_truncation=True, but this run has .*=Fal"):
        after.set_state(before.get_state())
