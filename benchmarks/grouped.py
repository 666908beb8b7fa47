"""The grouped product of experts alone, forward and both gradients, against dense products of as
many FLOPs.

    python benchmarks/grouped.py [--cases 8:32768:2048:7168,...] [--fp8]

A case is groups : rows : inputs : outputs, in bfloat16; groups have uneven sizes. The peer
multiplies all rows by one kernel, which is the compiler's own product at its best. --fp8: ours
rounds to fp8 and multiplies so, but for the gradient of the kernels; the peer stays in bfloat16.
The best of several runs. Prints one JSON line.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels import grouped_fp8
from maxtext.kernels.grouped import grouped_product

RUNS, TOGETHER = 5, 4
CASES = "8:32768:2048:7168,8:32768:7168:2048,64:196608:2048:1408,64:196608:1408:2048"


def seconds(function, *arguments):
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(TOGETHER)])
        times.append((time.perf_counter() - start) / TOGETHER)
    return min(times)


def measure(product, groups, rows, inputs, outputs):
    random = np.random.default_rng(0)
    shares = np.floor(random.dirichlet(np.full(groups, 20.0)) * rows).astype(np.int32)
    shares[-1] += rows - shares.sum()
    sizes = jnp.asarray(shares)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    drawn = [
        jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)
    ]
    x, kernels, cotangents = drawn

    def both_ways(product, x, kernels, cotangents):
        y, pull = jax.vjp(product, x, kernels)
        return y, pull(cotangents)

    def ours(x, kernels):
        return product(x, kernels, sizes, jax.default_backend())

    own = seconds(jax.jit(lambda *arrays: both_ways(ours, *arrays)), x, kernels, cotangents)
    dense = seconds(
        jax.jit(lambda *arrays: both_ways(jnp.matmul, *arrays)), x, kernels[0], cotangents
    )
    work = 6 * rows * inputs * outputs / 1e12
    return {
        "tflops": round(work / own, 1),
        "dense_tflops": round(work / dense, 1),
        "ratio": round(dense / own, 3),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()
    product = grouped_fp8.product if options.fp8 else grouped_product
    print(
        json.dumps(
            {
                case: measure(product, *map(int, case.split(":")))
                for case in options.cases.split(",")
            }
        )
    )


if __name__ == "__main__":
    main()
