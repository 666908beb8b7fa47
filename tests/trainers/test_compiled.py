"""Which program runs a batch, by its rows and by how many documents they have."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.trainers import compiled
from maxtext.trainers.compiled import ANY, CompiledSteps, counts, most_documents
from maxtext.trainers.setup import Setup

WORDS = ["base_emb_dim=16", "base_num_decoder_layers=1", "head_dim=8", "vocab_size=41", "enable_checkpointing=false"]


def batch(documents, rows=2, length=2048):
    """Of which the last row has so many documents of a token, and padding."""
    segments = np.ones((rows, length), np.int32)
    segments[-1] = 0
    segments[-1, :documents] = np.arange(1, documents + 1)
    return {"inputs": jnp.zeros((rows, length), jnp.int32), "inputs_segmentation": jnp.asarray(segments)}


@pytest.fixture
def steps(monkeypatch):
    """By the words of a configuration: steps that give what they were compiled for, and the list of all of those."""
    made = []

    def train_step(setup, rows):
        made.append((rows, setup.config.max_segments_per_seq))
        return lambda state, batch, key, program=made[-1]: program

    monkeypatch.setattr(compiled.ahead, "train_step", train_step)
    monkeypatch.setattr(compiled, "counts", lambda setup: True)

    def of(*words):
        return CompiledSteps(Setup.of(load(None, [*WORDS, *words], environ={}, devices=Devices(1)))), made

    return of


def test_a_batch_goes_to_the_program_for_the_fewest_documents_that_fits(steps):
    run, made = steps()
    run.for_rows(2)
    for documents, most in [(1, 15), (15, 15), (16, 31), (20, 31), (3, 15), (64, ANY), (40, ANY), (9, 15)]:
        assert run(None, batch(documents), None) == (2, most)
    assert made == [(2, 15), (2, 31), (2, ANY)]
    assert run(None, batch(3, rows=4), None) == (4, 15)


def test_a_bound_makes_one_program_unless_it_is_not_kept(steps):
    run, made = steps("max_segments_per_seq=20")
    assert [run(None, batch(documents), None)[1] for documents in (1, 20, 21, 20)] == [20, 20, 31, 20]
    assert made == [(2, 20), (2, 31)]


def test_short_rows_are_not_counted_on(steps):
    run, _ = steps("max_target_length=256")
    assert run(None, batch(2, length=256), None) == (2, ANY)


@pytest.mark.parametrize(
    ("rows", "documents"),
    [([[1, 1, 1]], 1), ([[1, 1, 2]], 1), ([[1, 2, 0]], 2), ([[1, 1, 0]], 1), ([[0, 1, 0], [1, 1, 1]], 2), ([[5]], 1)],
)
def test_most_documents(rows, documents):
    """A program for so many has room for one more run: the padding, or the last document of a full row."""
    assert most_documents(np.array(rows)) == documents


def test_batches_are_not_counted_where_it_would_not_help():
    assert not counts(Setup.of(load(None, WORDS, environ={}, devices=Devices(1))))  # this is no GPU
