"""Grouped matmul on Hopper GPUs. Without one: the table of tiles, lowering, and which shapes are
supported.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.hardware import gpu_capability
from maxtext.kernels import grouped_matmul, grouped_matmul_hopper
from tests.support.grouped_matmul import reference
from tests.support.hopper_arrays import ROWS, SIZES, abstract_arrays


@pytest.mark.parametrize("group_sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("block", [64, 128])
def test_tile_table_has_every_row_of_every_group_once(group_sizes, block):
    table = grouped_matmul_hopper.make_tile_table(jnp.array(group_sizes, jnp.int32), ROWS, block)
    assert len(table.groups) == ROWS // block + len(group_sizes) - 1
    rows = []
    for group, index, first, count in zip(*map(np.asarray, table), strict=True):
        assert 0 <= group < len(group_sizes)
        assert 0 <= index < ROWS // block
        if count:
            assert 0 <= first <= block - count
            rows += [(index * block + first + row, group) for row in range(count)]
    ends = np.cumsum(group_sizes)
    assert rows == [(row, int(np.searchsorted(ends, row, side="right"))) for row in range(ends[-1])]


def test_kernels_lower_for_gpus():
    group_sizes = jax.ShapeDtypeStruct((4,), "int32")

    def run(x, weights, dy, group_sizes):
        y, vjp = jax.vjp(lambda x, w: grouped_matmul.hopper_matmul(x, w, group_sizes), x, weights)
        return y, vjp(dy)

    lowered = jax.jit(run).trace(*abstract_arrays(), group_sizes)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("change", "supported"),
    [
        ({}, True),
        ({"dtype": "float32"}, False),
        ({"rows": 500}, False),
        ({"rows": 64}, False),
        ({"inputs": 96}, False),
        ({"outputs": 100}, False),
        ({"groups": 300}, True),
    ],
)
def test_supported_shapes(change, supported):
    x, weights, _ = abstract_arrays(**change)
    assert grouped_matmul.hopper_supports(x, weights) == supported


@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a Hopper GPU")
@pytest.mark.parametrize("group_sizes", SIZES.values(), ids=list(SIZES))
def test_output_and_gradients_match_a_loop_over_groups(group_sizes):
    random = np.random.default_rng(0)
    x, weights, dy = (
        jnp.asarray(random.normal(size=array.shape), array.dtype)
        for array in abstract_arrays(groups=len(group_sizes))
    )
    end = sum(group_sizes)  # of the rows; results after it are undefined
    x, dy = (array.at[end:].set(jnp.nan) for array in (x, dy))
    y, vjp = jax.vjp(
        lambda x, w: grouped_matmul.grouped_matmul(x, w, jnp.array(group_sizes, jnp.int32), "gpu"),
        x,
        weights,
    )
    dx, dw = vjp(dy)
    expected = reference(x, weights, group_sizes, dy)
    for actual, right in zip((y, dx, dw), expected, strict=True):
        last = len(right) if right is expected[2] else end
        np.testing.assert_allclose(
            np.asarray(actual[:last], np.float64),
            right[:last],
            rtol=0.01,
            atol=0.01 * np.max(abs(right), initial=1),
        )
