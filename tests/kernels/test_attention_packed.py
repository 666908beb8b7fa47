"""Packed rows as cuDNN takes them: the offsets and lengths of segments. test_attention_gpu.py
compares the results with dot_product, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

from maxtext.kernels.attention import AttentionMask, attend
from maxtext.kernels.attention.cudnn import segment_runs

PRIMITIVE = "dot_product_attention_fwd"


def test_segment_runs():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0], [7, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 6]])
    starts, lengths, fits = segment_runs(segments, 3)
    assert starts[:2].tolist() == [[0, 2, 5, -1], [0, -1, -1, -1]]
    assert lengths[:2].tolist() == [[2, 3, 1], [6, -1, -1]]
    assert fits.tolist() == [True, True, False]


def test_segment_runs_of_random_rows():
    random = np.random.default_rng(0)
    segments = np.sort(random.integers(1, 6, (20, 40)), axis=1)
    starts, lengths, fits = (np.asarray(array) for array in segment_runs(jnp.asarray(segments), 6))
    assert fits.all()
    for row, begin, length in zip(segments, starts, lengths, strict=True):
        run_lengths = np.unique(row, return_counts=True)[1]
        count = len(run_lengths)
        assert length[:count].tolist() == run_lengths.tolist()
        assert begin[:count].tolist() == [0, *np.cumsum(run_lengths)[:-1]]
        assert (length[count:] == -1).all()
        assert (begin[count:] == -1).all()


@pytest.mark.parametrize(
    ("max_segments", "heads", "packed"),
    [(4, 2, True), (4, 1, True), (8, 2, True), (9, 2, False), (0, 2, False)],
)
def test_rows_with_few_segments_need_no_dense_mask(monkeypatch, max_segments, heads, packed):
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda capability: False)
    q, k = (jax.ShapeDtypeStruct((3, 256, count, 64), jnp.bfloat16) for count in (2, heads))
    segments = jax.ShapeDtypeStruct((3, 256), jnp.int32)

    def run(q, k, v, segments):
        options = {"q_segments": segments, "max_segments": max_segments, "platform": "gpu"}
        return attend(
            q, k, v, backend="cudnn_flash_jax", mask=AttentionMask(), scale=0.1, **options
        )

    text = str(jax.make_jaxpr(run)(q, k, k, segments))
    assert PRIMITIVE in text
    assert ("bf16[3,1,256,256]" in text) != packed
    assert (f"i32[3,{max_segments + 1}]" in text) == packed
