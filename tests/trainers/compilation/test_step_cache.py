"""Which program runs a batch, by its rows and the segments of a row."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.kernels.attention import cudnn
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.compilation import aot
from maxtext.trainers.compilation.aot import UNBOUNDED, StepCache, largest_segment_bucket
from maxtext.trainers.data_loader import DeviceBatch, max_segments

OVERRIDES = [
    "base_emb_dim=16",
    "base_num_decoder_layers=1",
    "head_dim=8",
    "vocab_size=41",
    "enable_checkpointing=false",
]


def context_of(*overrides):
    last = {override.partition("=")[0]: override for override in (*OVERRIDES, *overrides)}
    return build_run_context(
        load(None, from_overrides(last.values()), environ={}, devices=Devices(1)), jax.devices()[:1]
    )


def batch(segments, rows=2):
    return DeviceBatch({"inputs": jnp.zeros((rows, 16), jnp.int32)}, max_segments=segments)


@pytest.fixture
def steps(monkeypatch):
    """(overrides) -> a cache of steps that return (rows, bucket) of their program, and the list of
    all programs that were compiled."""
    programs = []

    def load_or_compile(context, rows):
        programs.append((rows, context.config.max_segments_per_seq))
        return lambda state, batch, key, program=programs[-1]: program

    monkeypatch.setattr(aot, "load_or_compile", load_or_compile)
    monkeypatch.setattr(aot, "largest_segment_bucket", lambda context: 63)

    def make(*overrides):
        return StepCache(context_of(*overrides)), programs

    return make


def test_a_batch_runs_the_program_of_the_smallest_bucket_that_holds_it(steps):
    run, programs = steps()
    run.get(2)
    for segments, bucket in [
        (1, 15),
        (15, 15),
        (64, UNBOUNDED),
        (16, 31),
        (20, 31),
        (3, 15),
        (40, 63),
        (63, 63),
        (9, 15),
    ]:
        assert run(None, batch(segments), None) == (2, bucket)
    assert programs == [(2, 15), (2, UNBOUNDED), (2, 31), (2, 63)]
    assert run(None, batch(3, rows=4), None) == (4, 15)


def test_max_segments_per_seq_makes_one_program_unless_the_data_exceeds_it(steps):
    run, programs = steps("max_segments_per_seq=20")
    assert [run(None, batch(segments), None)[1] for segments in (1, 20, 21, 20)] == [
        20,
        20,
        31,
        20,
    ]
    assert programs == [(2, 20), (2, 31)]


def test_a_bound_above_the_largest_bucket_is_ignored(steps):
    run, _ = steps("max_segments_per_seq=64")
    assert [run(None, batch(segments), None)[1] for segments in (3, 16, 64)] == [15, 31, UNBOUNDED]


@pytest.mark.parametrize(
    ("segment_ids", "expected"),
    [
        ([[1, 1, 1]], 1),
        ([[1, 1, 2]], 1),
        ([[1, 2, 0]], 2),
        ([[1, 1, 0]], 1),
        ([[0, 1, 0], [1, 1, 1]], 2),
        ([[5]], 1),
    ],
)
def test_max_segments(segment_ids, expected):
    """A program for n segments has room for one more: the padding, or the last segment of a full
    row."""
    assert max_segments({"inputs_segmentation": np.array(segment_ids)}) == expected


def test_max_segments_of_a_process_that_reads_no_rows():
    assert max_segments({}) == 1
    assert max_segments({"inputs_segmentation": np.zeros((0, 8), np.int32)}) == 1


@pytest.mark.parametrize(
    ("overrides", "limit"),
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
def test_largest_segment_bucket(overrides, limit, monkeypatch):
    """On one GPU whose cuDNN packs segments; it need not be present."""
    monkeypatch.setattr(cudnn, "target_capability", lambda: "9.0")
    context = context_of("dataset_type=tfds", "head_dim=128", *overrides)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    here = SimpleNamespace(config=context.config, rules=SimpleNamespace(mesh=mesh))
    assert largest_segment_bucket(here) == limit
    mesh.devices = np.array([SimpleNamespace(platform="cpu")])
    assert largest_segment_bucket(here) == 0
    mesh.devices = np.array([SimpleNamespace(platform="gpu")] * 2)
    assert largest_segment_bucket(here) == 0
