"""The grouped matmul of experts alone, forward and both gradients, against dense matmuls of as
many FLOPs.

    python benchmarks/grouped.py [--cases 8:32768:2048:7168,...] [--fp8]

A case is groups : rows : inputs : outputs, in bfloat16; groups have uneven sizes. The baseline
multiplies all rows by one weight, which is the compiler's own matmul at its best. --fp8: the
grouped matmul computes y and dx in fp8; the baseline stays in bfloat16. Each time is the best of
several runs. Prints one JSON line.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.fp8.grouped_matmul import grouped_matmul_fp8
from maxtext.kernels.grouped_matmul import grouped_matmul

RUNS, CALLS_PER_RUN = 5, 4
CASES = "8:32768:2048:7168,8:32768:7168:2048,64:196608:2048:1408,64:196608:1408:2048"


def seconds(function, *arguments):
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(CALLS_PER_RUN)])
        times.append((time.perf_counter() - start) / CALLS_PER_RUN)
    return min(times)


def measure(matmul, groups, rows, inputs, outputs):
    random = np.random.default_rng(0)
    sizes = np.floor(random.dirichlet(np.full(groups, 20.0)) * rows).astype(np.int32)
    sizes[-1] += rows - sizes.sum()
    group_sizes = jnp.asarray(sizes)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    x, weights, dy = (
        jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)
    )

    def forward_and_backward(matmul, x, weights, dy):
        y, vjp = jax.vjp(matmul, x, weights)
        return y, vjp(dy)

    def grouped(x, weights):
        return matmul(x, weights, group_sizes, jax.default_backend())

    grouped_seconds = seconds(
        jax.jit(lambda *arrays: forward_and_backward(grouped, *arrays)), x, weights, dy
    )
    dense_seconds = seconds(
        jax.jit(lambda *arrays: forward_and_backward(jnp.matmul, *arrays)), x, weights[0], dy
    )
    tera_ops = 6 * rows * inputs * outputs / 1e12
    return {
        "tflops": round(tera_ops / grouped_seconds, 1),
        "dense_tflops": round(tera_ops / dense_seconds, 1),
        "ratio": round(dense_seconds / grouped_seconds, 3),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()
    matmul = grouped_matmul_fp8 if options.fp8 else grouped_matmul
    results = {
        case: measure(matmul, *map(int, case.split(":"))) for case in options.cases.split(",")
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
