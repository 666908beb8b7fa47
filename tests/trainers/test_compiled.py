"""Which program runs a batch, by its rows and by how many documents they have."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.kernels.attention import cudnn
from maxtext.trainers import compiled
from maxtext.trainers.compiled import ANY, CompiledSteps, most_counted, most_documents
from maxtext.trainers.setup import Setup

WORDS = [
    "base_emb_dim=16",
    "base_num_decoder_layers=1",
    "head_dim=8",
    "vocab_size=41",
    "enable_checkpointing=false",
]


def setup_of(*words):
    last = {word.partition("=")[0]: word for word in (*WORDS, *words)}
    return Setup.of(
        load(None, from_overrides(last.values()), environ={}, devices=Devices(1)), jax.devices()[:1]
    )


def batch(documents, rows=2, length=2048):
    """Of which the last row has so many documents of a token, and padding."""
    segments = np.ones((rows, length), np.int32)
    segments[-1] = 0
    segments[-1, :documents] = np.arange(1, documents + 1)
    return {
        "inputs": jnp.zeros((rows, length), jnp.int32),
        "inputs_segmentation": jnp.asarray(segments),
    }


@pytest.fixture
def steps(monkeypatch):
    """By the words of a configuration: steps that give what they were compiled for, and the list of
    all of those.
    """
    made = []

    def train_step(setup, rows):
        made.append((rows, setup.config.max_segments_per_seq))
        return lambda state, batch, key, program=made[-1]: program

    monkeypatch.setattr(compiled.ahead, "train_step", train_step)
    monkeypatch.setattr(compiled, "most_counted", lambda setup: 63)

    def of(*words):
        return CompiledSteps(setup_of(*words)), made

    return of


def test_a_batch_goes_to_the_program_for_the_fewest_documents_that_fits(steps):
    run, made = steps()
    run.for_rows(2)
    for documents, most in [
        (1, 15),
        (15, 15),
        (64, ANY),
        (16, 31),
        (20, 31),
        (3, 15),
        (40, 63),
        (63, 63),
        (9, 15),
    ]:
        assert run(None, batch(documents), None) == (2, most)
    assert made == [(2, 15), (2, ANY), (2, 31), (2, 63)]
    assert run(None, batch(3, rows=4), None) == (4, 15)


def test_a_bound_makes_one_program_unless_it_is_not_kept(steps):
    run, made = steps("max_segments_per_seq=20")
    assert [run(None, batch(documents), None)[1] for documents in (1, 20, 21, 20)] == [
        20,
        20,
        31,
        20,
    ]
    assert made == [(2, 20), (2, 31)]


def test_a_bound_that_is_too_large_to_be_fast_bounds_nothing(steps):
    run, _ = steps("max_segments_per_seq=64")
    assert [run(None, batch(documents), None)[1] for documents in (3, 16, 64)] == [15, 31, ANY]


@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        ([[1, 1, 1]], 1),
        ([[1, 1, 2]], 1),
        ([[1, 2, 0]], 2),
        ([[1, 1, 0]], 1),
        ([[0, 1, 0], [1, 1, 1]], 2),
        ([[5]], 1),
    ],
)
def test_most_documents(rows, documents):
    """A program for so many has room for one more run: the padding, or the last document of a full
    row.
    """
    assert most_documents(np.array(rows)) == documents


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ([], 63),
        (["head_dim=64"], 31),
        (["max_target_length=1024"], 31),
        (["max_target_length=256"], 0),  # a mask is as fast
        (["packing=false"], 0),
        (["dataset_type=synthetic"], 0),
        (["dtype=float32"], 0),
        (["attention=dot_product"], 0),
        (["attn_logits_soft_cap=50"], 0),
        (["compiled_trainstep_file=step.bin"], 0),
    ],
)
def test_where_batches_are_counted(words, limit, monkeypatch):
    """On a GPU that has what it takes; this is none."""
    monkeypatch.setattr(cudnn, "target_capability", lambda: "9.0")
    setup = setup_of("dataset_type=tfds", "head_dim=128", *words)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    here = SimpleNamespace(config=setup.config, rules=SimpleNamespace(mesh=mesh))
    assert most_counted(here) == limit
    mesh.devices = np.array([SimpleNamespace(platform="cpu")])
    assert most_counted(here) == 0
    mesh.devices = np.array([SimpleNamespace(platform="gpu")] * 2)
    assert most_counted(here) == 0
