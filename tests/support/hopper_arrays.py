"""Arrays of the Hopper kernel."""

import jax

SIZES = {
    "aligned": [128, 256, 128],
    "unaligned": [100, 0, 60, 30, 322],
    "edges": [0, 1, 127, 128, 129, 0, 127],
    "rest": [5, 300],
    "nothing": [0, 0, 0],
}
ROWS = 512


def abstract_arrays(groups=4, rows=ROWS, inputs=128, outputs=320, dtype="bfloat16"):
    """x, weights and dy."""
    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
