"""Files that disappear or shrink while a run reads them raise an error that names the file, for
every source.
"""

import os
import time
from itertools import islice

import pytest

from maxtext.common.errors import UserError
from maxtext.input_pipeline.formats import interface
from tests.input_pipeline.corpora import SOURCES
from tests.support.batches import make_train_iterator

# Files of many pages: a mapped file that loses its last page ends the process that reads from it.
DOCUMENTS = [f"document number {number:03} of many, " * 100 for number in range(120)]
# The user's function has the documents in memory; `datasets` reads files by itself; the others are
# in the same formats.
FORMATS = ["text", "jsonl", "parquet", "arrayrecord", "tfrecord", "hf-arrow", "hf-text"]


@pytest.fixture(autouse=True)
def blocks_are_not_kept(monkeypatch):
    """Drop caches, so that files are read again."""
    monkeypatch.setattr(interface, "DECODED_BLOCKS", 2)


def run_until(make_config, folder, source, damage):
    """The error of an endless run whose files are changed after its third batch."""
    settings = SOURCES[source](folder, DOCUMENTS)
    config = make_config(
        **settings,
        max_target_length=32,
        packing=False,
        num_epoch=10**6,
        enable_data_shuffling=True,
        grain_prefetch_buffer_size=2,
        grain_shuffle_buffer_size=1,
    )
    iterator = make_train_iterator(config)
    for _ in range(3):
        next(iterator)
    time.sleep(1)  # until threads have read ahead: nothing saves one that reads a mapped file now
    for path in folder.rglob("*"):
        if path.is_file():
            damage(path)
    with pytest.raises(UserError) as stopped:
        list(islice(iterator, 20 * len(DOCUMENTS)))
    iterator.close()
    return str(stopped.value)


@pytest.mark.parametrize("source", FORMATS)
def test_file_that_disappears_raises(make_config, tmp_path, source, monkeypatch):
    monkeypatch.setattr(interface, "OPEN_FILES", 1)  # one that stays open can be read to its end
    said = run_until(make_config, tmp_path, source, os.unlink)
    assert str(tmp_path) in said
    assert "cannot be read any more" in said


@pytest.mark.parametrize("source", [source for source in FORMATS if source != "text"])
def test_file_that_shrinks_raises(make_config, tmp_path, source, monkeypatch):
    """Text files are read as they are: a shorter file is a shorter document."""
    if source != "hf-arrow":  # of the others some have read so small a file as a whole
        monkeypatch.setattr(interface, "OPEN_FILES", 1)
    said = run_until(
        make_config, tmp_path, source, lambda path: os.truncate(path, path.stat().st_size // 2)
    )
    assert all(str(tmp_path) in line for line in said.splitlines())  # a line for each record
