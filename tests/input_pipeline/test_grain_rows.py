"""Shift, segments, positions, special tokens and long documents, against rows written by hand."""

import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline import FIELDS
from tests.support.batches import make_train_iterator

BOS, EOS = 1, 2
A, B, C, D, E, F, G = range(100, 107)  # "a" is byte 97, and bytes start at 3


def rows_of(config):
    batches = list(make_train_iterator(config))
    for batch in batches:
        assert tuple(batch) == FIELDS
        shape = (config.global_batch_size_to_load, config.max_target_length)
        assert all(array.dtype == np.int32 and array.shape == shape for array in batch.values())
        for kind in ("position", "segmentation"):
            np.testing.assert_array_equal(batch[f"inputs_{kind}"], batch[f"targets_{kind}"])
    return [
        {field: batch[field][row].tolist() for field in FIELDS}
        for batch in batches
        for row in range(shape[0])
    ]


def test_one_document_per_row_without_packing(make_config, write):
    first, second = rows_of(make_config(grain_train_files=write("abc", "d"), packing=False))
    assert first["inputs"] == [BOS, A, B, C, 0, 0, 0, 0]
    assert first["targets"] == [A, B, C, EOS, 0, 0, 0, 0]
    assert first["targets_segmentation"] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert first["targets_position"] == [0, 1, 2, 3, 0, 0, 0, 0]
    assert second["inputs"][:2] == [BOS, D]
    assert second["targets_segmentation"] == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_documents_that_fit_share_a_row(make_config, write, packing):
    config = make_config(grain_train_files=write("abc", "de", "fg"), grain_packing_type=packing)
    first, second = rows_of(config)
    assert first["inputs"] == [BOS, A, B, C, BOS, D, E, 0]
    assert first["targets"] == [A, B, C, EOS, D, E, EOS, 0]
    assert first["targets_segmentation"] == [1, 1, 1, 1, 2, 2, 2, 0]
    assert first["targets_position"] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert second["inputs"] == [BOS, F, G, 0, 0, 0, 0, 0]


def test_best_fit_chooses_the_fullest_row(make_config, write):
    # Pairs: 5, then 6 (no room beside 5), then 2: the first row has 3 places left, the second
    # exactly 2.
    documents = ["aaaa", "bbbbb", "c"]
    first_fit = rows_of(
        make_config(grain_train_files=write(*documents, name="1"), grain_packing_type="first_fit")
    )
    best_fit = rows_of(
        make_config(grain_train_files=write(*documents, name="2"), grain_packing_type="best_fit")
    )
    assert [max(row["inputs_segmentation"]) for row in first_fit] == [2, 1]
    assert [max(row["inputs_segmentation"]) for row in best_fit] == [1, 2]


def test_concat_then_split_leaves_no_padding(make_config, write):
    config = make_config(
        grain_train_files=write("abc", "de", "fg"), grain_packing_type="concat_then_split"
    )
    first, second = rows_of(config)
    assert first["inputs"] == [BOS, A, B, C, BOS, D, E, BOS]
    assert first["targets"] == [A, B, C, EOS, D, E, EOS, F]
    assert first["targets_segmentation"] == [1, 1, 1, 1, 2, 2, 2, 3]
    assert second["inputs"] == [F, G, 0, 0, 0, 0, 0, 0]
    assert second["targets"] == [G, EOS, 0, 0, 0, 0, 0, 0]
    assert second["targets_position"] == [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "inputs", "targets"),
    [
        (True, False, [BOS, A, B, 0], [A, B, C, 0]),
        (False, True, [A, B, C, 0], [B, C, EOS, 0]),
        # Without an end token the last token has no target, so it is no input.
        (False, False, [A, B, 0, 0], [B, C, 0, 0]),
    ],
)
def test_special_tokens(make_config, write, add_bos, add_eos, inputs, targets):
    config = make_config(
        grain_train_files=write("abc"), max_target_length=4, add_bos=add_bos, add_eos=add_eos
    )
    (row,) = rows_of(config)
    assert (row["inputs"], row["targets"]) == (inputs, targets)


def test_byte_tokenizer_adds_no_special_tokens(make_config, write):
    (row,) = rows_of(
        make_config(grain_train_files=write("abc"), vocab_size=256, max_target_length=4)
    )
    assert (row["inputs"], row["targets"]) == ([97, 98, 0, 0], [98, 99, 0, 0])


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "concat_then_split", None])
def test_truncation_keeps_the_beginning(make_config, write, packing):
    update = {"packing": False} if packing is None else {"grain_packing_type": packing}
    config = make_config(
        grain_train_files=write("abcdefgabcdefgabcdefg"), use_truncation=True, **update
    )
    (row,) = rows_of(config)
    assert row["inputs"] == [BOS, A, B, C, D, E, F, G]
    assert row["targets"] == [A, B, C, D, E, F, G, A]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "concat_then_split", None])
def test_splits_long_documents_without_truncation(make_config, write, packing):
    text = "abcdefgabcdefgabcdefg"  # 21 bytes: 22 pairs, rows of 8, 8 and 6
    update = {"packing": False} if packing is None else {"grain_packing_type": packing}
    rows = rows_of(make_config(grain_train_files=write(text), use_truncation=False, **update))
    assert [sum(row["targets_segmentation"]) for row in rows] == [8, 8, 6]
    tokens = [BOS, *(ord(letter) + 3 for letter in text), EOS]
    assert [token for row in rows for token in row["inputs"]][:22] == tokens[:-1]
    assert [token for row in rows for token in row["targets"]][:22] == tokens[1:]
    assert all(row["inputs_position"][:6] == [0, 1, 2, 3, 4, 5] for row in rows)


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
@pytest.mark.parametrize(("limit", "most"), [(-1, 4), (1, 1), (3, 3)])
def test_max_segments_per_seq(make_config, write, packing, limit, most):
    folder = write(*"abcdefgh")  # two pairs each
    rows = rows_of(
        make_config(
            grain_train_files=folder, grain_packing_type=packing, max_segments_per_seq=limit
        )
    )
    assert max(max(row["inputs_segmentation"]) for row in rows) == most
    assert sum(max(row["inputs_segmentation"]) for row in rows) == 8


def test_concat_then_split_cannot_limit_segments(make_config, write):
    config = make_config(
        grain_train_files=write("abc"),
        grain_packing_type="concat_then_split",
        max_segments_per_seq=2,
    )
    with pytest.raises(ConfigError, match="use first_fit or best_fit"):
        make_train_iterator(config)


def test_bytes_that_are_not_utf8_are_replaced(make_config, write):
    (row,) = rows_of(make_config(grain_train_files=write(b"a\xff\r\n")))
    assert row["targets"] == [A, 0xEF + 3, 0xBF + 3, 0xBD + 3, 13 + 3, 10 + 3, EOS, 0]


def test_empty_files_are_skipped(make_config, write):
    rows = rows_of(make_config(grain_train_files=write("", "abc", "", "de", ""), packing=False))
    assert [row["inputs"][1] for row in rows] == [A, D]
