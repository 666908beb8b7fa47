"""Document orders at the size of large corpora, and state that the streams of a process share."""

import gc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from maxtext.input_pipeline.formats import interface
from maxtext.input_pipeline.formats.tables import ParquetRows
from maxtext.input_pipeline.interface import ShardSpec
from maxtext.input_pipeline.order import PERMUTATIONS, epoch_order, split_blocks
from tests.support.batches import make_train_iterator


def test_split_blocks_cover_every_document_once_in_order():
    blocks = np.array([5, 0, 1, 100, 7, 0, 33])
    starts, sizes = split_blocks(blocks, 16)
    assert len(sizes) >= 16
    assert sizes.min() > 0
    covered = np.concatenate(
        [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    )
    np.testing.assert_array_equal(covered, np.arange(blocks.sum()))
    # No piece crosses a block, and those of one block differ by one document at most.
    block = np.searchsorted(np.cumsum(blocks), starts, side="right")
    np.testing.assert_array_equal(
        block, np.searchsorted(np.cumsum(blocks), starts + sizes - 1, side="right")
    )
    assert all(np.ptp(sizes[block == one]) <= 1 for one in set(block))


def test_order_of_a_million_blocks():
    blocks = np.full(10**6, 100)
    order = epoch_order(10**8, blocks, ShardSpec(1, index=3, count=8), seed=1)
    documents = [order[index] for index in range(2000)]
    assert len(set(documents)) == 2000
    assert len(order) > 10**7


def test_streams_partition_one_permutation():
    streams = [
        epoch_order(1000, None, ShardSpec(1, index=number, count=4), seed=11) for number in range(4)
    ]
    seen = [stream[index] for stream in streams for index in range(len(stream))]
    assert sorted(seen) == list(range(1000))
    # Kept once, under a key that no other test uses, and only while a stream needs it.
    assert [key for key in PERMUTATIONS if key[:2] == (1000, 11)] == [(1000, 11, 0)]
    del streams
    gc.collect()
    assert (1000, 11, 0) not in PERMUTATIONS


@pytest.mark.parametrize("shard", [ShardSpec(1), ShardSpec(1, index=1, count=2)])
def test_large_blocks_are_decoded_about_once(make_config, tmp_path, monkeypatch, shard):
    """Files of one row group each, as pyarrow writes them, of which the cache holds three."""
    text, rows, files = "x" * 1000, 200, 12
    monkeypatch.setattr(interface, "DECODED_BYTES", 3 * rows * len(text))
    for number in range(files):
        table = pyarrow.table({"text": [f"{number} {row} {text}" for row in range(rows)]})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    loads = []
    load = ParquetRows.load
    monkeypatch.setattr(
        ParquetRows, "load", lambda self, number: loads.append(self.path) or load(self, number)
    )
    config = make_config(
        grain_train_files=str(tmp_path),
        grain_file_type="parquet",
        enable_data_shuffling=True,
        packing=False,
        grain_num_threads=4,
    )
    assert sum(1 for _ in make_train_iterator(config, shard)) == files * rows // shard.count
    assert len(loads) <= 2.5 * files
