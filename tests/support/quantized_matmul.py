"""Quantized matmuls to compare."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.quantized_matmul import quantized_matmul

OUTER, INPUTS, OUTPUTS = (2, 5), (3, 8), (4, 6)


def problem(seed=0):
    random = np.random.default_rng(seed)
    shapes = ((*OUTER, *INPUTS), (*INPUTS, *OUTPUTS), (*OUTER, *OUTPUTS))
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def matmul(x, weight, *options):
    return quantized_matmul(x, (weight,), *options)[0]


def run(precision, x, weight, dy, dtype=jnp.float32, platform=None):
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    with jax.default_matmul_precision("highest"):  # of matmuls that are not quantized
        y, vjp = jax.vjp(
            lambda x, weight: matmul(x, weight, 2, precision, dtype, platform), x, weight
        )
        return (y, *vjp(jnp.asarray(dy, dtype)))
