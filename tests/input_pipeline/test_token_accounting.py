"""Every token of real text is read exactly once, for each packing, against a naive loop over the
documents.
"""

import sysconfig
from collections import Counter
from itertools import chain, groupby, pairwise
from pathlib import Path

import pytest

from maxtext.input_pipeline import Split, open_data_streams

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
