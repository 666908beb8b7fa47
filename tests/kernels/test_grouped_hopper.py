"""Grouped products on Hopper GPUs. Without one: the table of tiles, that programs can be made, and
who gets them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.gpu import gpu_capability
from maxtext.kernels import grouped, grouped_hopper

SIZES = {
    "aligned": [128, 256, 128],
    "anywhere": [100, 0, 60, 30, 322],
    "edges": [0, 1, 127, 128, 129, 0, 127],
    "rest": [5, 300],
    "nothing": [0, 0, 0],
}
ROWS = 512


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_have_every_row_of_every_group_once(sizes, block):
    tiles = grouped_hopper.tiles_of(jnp.array(sizes, jnp.int32), ROWS, block)
    assert len(tiles.groups) == ROWS // block + len(sizes) - 1
    found = []
    for group, at, first, count in zip(*map(np.asarray, tiles), strict=True):
        assert 0 <= group < len(sizes)
        assert 0 <= at < ROWS // block
        if count:
            assert 0 <= first <= block - count
            found += [(at * block + first + row, group) for row in range(count)]
    ends = np.cumsum(sizes)
    assert found == [
        (row, int(np.searchsorted(ends, row, side="right"))) for row in range(ends[-1])
    ]


def arguments(groups=4, rows=ROWS, inputs=128, outputs=320, dtype="bfloat16"):
    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def test_they_can_be_lowered_for_gpus():
    rows, kernels, cotangents = arguments()
    sizes = jax.ShapeDtypeStruct((4,), "int32")

    def run(rows, kernels, cotangents, sizes):
        product, pull = jax.vjp(
            lambda rows, kernels: grouped.hopper_product(rows, kernels, sizes), rows, kernels
        )
        return product, pull(cotangents)

    text = (
        jax.jit(run)
        .trace(rows, kernels, cotangents, sizes)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("changed", "right"),
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
def test_what_they_are_for(changed, right):
    rows, kernels, _ = arguments(**changed)
    assert grouped.hopper_has(rows, kernels) == right


@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a Hopper GPU")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_product_and_gradients(sizes):
    random = np.random.default_rng(0)
    rows, kernels, cotangents = (
        jnp.asarray(random.normal(size=one.shape), one.dtype)
        for one in arguments(groups=len(sizes))
    )
    rows, cotangents = (array.at[sum(sizes) :].set(jnp.nan) for array in (rows, cotangents))
    product, pull = jax.vjp(
        lambda rows, kernels: grouped.grouped_product(
            rows, kernels, jnp.array(sizes, jnp.int32), "gpu"
        ),
        rows,
        kernels,
    )
    right = np.zeros(product.shape), np.zeros(rows.shape), np.zeros(kernels.shape)
    known = sum(sizes)  # of the rows; what is behind them may be anything
    wide = [np.asarray(array, np.float64) for array in (rows, kernels, cotangents)]
    start = 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        right[0][mine] = wide[0][mine] @ wide[1][group]
        right[1][mine] = wide[2][mine] @ wide[1][group].T
        right[2][group] = wide[0][mine].T @ wide[2][mine]
        start += size
    for ours, theirs in zip(
        (product[:known], *pull(cotangents)), (right[0][:known], *right[1:]), strict=True
    ):
        end = known if ours.shape == rows.shape else len(ours)
        np.testing.assert_allclose(
            np.asarray(ours[:end], np.float64),
            theirs[:end],
            rtol=0.01,
            atol=0.01 * np.max(abs(theirs), initial=1),
        )
