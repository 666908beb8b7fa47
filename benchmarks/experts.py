"""Microseconds of matmuls with selected experts, as in a decode step, on one NVIDIA GPU.

    python benchmarks/experts.py [--cases 32:2880:2880:4:mxfp4,128:2048:768:8:fp8] [--rows 1,32]
        [--tiles 64:256:4:3:2,...]

A case is experts : inputs : outputs : experts of a row : format, which is bf16, fp8 or mxfp4. Each
case is timed as gate and up with the activation between them, and as down. Tiles are columns :
depth : warps : stages : spans, to compare with the default ones. Every call selects other experts,
so that caches hold none of their weights. Prints one JSON line for each: the time of a call with
the kernels around it, the time that reading the weights takes at --bandwidth TB/s, and the error of
three rows against float32, ‖y − reference‖ / ‖reference‖.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.decode.experts import ExpertMatrix, expert_matmul
from maxtext.kernels.decode.tiles import Tiles
from maxtext.kernels.fp8.quantize import E4M3
from maxtext.kernels.weight_only import MXFP4, QuantizedWeight

CALLS = 48  # in a program
RUNS = 4


def random_weight(kind, shape, seed):
    key = jax.random.key(seed)
    if kind == MXFP4:
        experts, inputs, outputs = shape
        codes = jax.random.bits(key, (experts, outputs, inputs // 2), jnp.uint8)
        exponents = 120 + jax.random.bits(key, (experts, outputs, inputs // 32), jnp.uint8) % 4
        return QuantizedWeight(codes, exponents, MXFP4)
    weight = jax.random.normal(key, shape, jnp.bfloat16)
    return weight.astype(E4M3) if kind == "fp8" else weight


def matrix(kind, weight):
    experts, _, outputs = weight.shape
    scale = jnp.ones((experts, outputs)) if kind == "fp8" else None
    return ExpertMatrix(weight, scale)


def gate(products):
    return jax.nn.silu(products[0]) * products[1] if len(products) > 1 else products[0]


def draw_experts(rows, topk, experts):
    """For each call [T, A]: different experts, as far as there are enough."""
    random = np.random.default_rng(0)
    count = max(1, experts // (topk * rows)) if rows == 1 else 4
    order = random.permutation(experts)
    if rows == 1:
        return np.stack([order[i * topk : (i + 1) * topk] for i in range(count)])
    choose = [[random.permutation(experts)[:topk] for _ in range(rows)] for _ in range(count)]
    return np.array(choose).reshape(count, -1)


def relative_error(kind, x, ids, weights):
    y = jax.jit(lambda x, w: expert_matmul(x, ids, [matrix(kind, each) for each in w], gate))(
        x, weights
    )
    errors, per_row = [], len(ids) // len(x)
    for index in (0, len(ids) // 2, len(ids) - 1):
        products = []
        for weight in weights:
            own = jax.tree.map(lambda part, index=index: part[ids[index]][None], weight)
            own = own.astype(jnp.float32)[0]
            row = x[index // per_row].astype(jnp.float32)
            products.append(jnp.dot(row, own, precision="highest"))
        expected = gate(products)
        error = jnp.linalg.norm(y[index].astype(jnp.float32) - expected)
        errors.append(float(error / jnp.linalg.norm(expected)))
    return max(errors)


def seconds_of_call(kind, x, ids, weights, tiles, spans):
    repeats = max(1, CALLS // len(ids))

    def run(x, weights):
        matrices = [matrix(kind, weight) for weight in weights]

        def call_all(_, total):
            for row in ids:
                shifted = x + 0 * total[:1, :1].astype(x.dtype)  # after the call before
                y = expert_matmul(shifted, row, matrices, gate, tiles, spans)
                total += y[:1].astype(jnp.float32)
            return total

        zeros = jnp.zeros((1, weights[0].shape[-1]))
        return jax.lax.fori_loop(0, repeats, call_all, zeros)

    program, seconds = jax.jit(run), []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(x, weights))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / (repeats * len(ids))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default="32:2880:2880:4:mxfp4,128:2048:768:8:fp8,128:2048:768:8:bf16"
    )
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--tiles", default="")
    parser.add_argument("--bandwidth", type=float, default=4.2)  # of an H200, measured
    options = parser.parse_args()
    variants = [(None, None)]
    for tiles in filter(None, options.tiles.split(",")):
        *sizes, spans = map(int, tiles.split(":"))
        variants.append((Tiles(*sizes), spans))
    for case in options.cases.split(","):
        *sizes, kind = case.split(":")
        experts, inputs, outputs, topk = map(int, sizes)
        for rows in map(int, options.rows.split(",")):
            ids = draw_experts(rows, topk, experts)
            for name, shape, count in (
                ("gate and up", (experts, inputs, outputs), 2),
                ("down", (experts, outputs, inputs), 1),
            ):
                weights = [random_weight(kind, shape, seed) for seed in range(count)]
                num_rows = rows if count > 1 else rows * topk
                x = jax.random.normal(jax.random.key(9), (num_rows, shape[1]), jnp.bfloat16)
                num_bytes = sum(part.nbytes for part in jax.tree.leaves(weights))
                floor = num_bytes * len(set(ids[0].tolist())) / experts / options.bandwidth / 1e12
                error = relative_error(kind, x, jnp.asarray(ids[0]), weights)
                for tiles, spans in variants:
                    result = {"case": case, "rows": rows, "matmul": name}
                    if tiles is not None:
                        result["tiles"] = f"{tiles}, {spans} spans"
                    call = seconds_of_call(kind, x, jnp.asarray(ids), weights, tiles, spans)
                    result |= {
                        "microseconds": round(call * 1e6, 1),
                        "reading": round(floor * 1e6, 1),
                        "error": round(error, 5),
                    }
                    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
