"""The perplexity of quantized models, on the eval_steps batches of a run, the memory of their
weights, and how fast such models generate.

    maxtext train quickstart
    python benchmarks/quantized.py maxtext_output/quickstart [KEY=VALUE[,KEY=VALUE…] …]
    python benchmarks/quantized.py --train DIR [--speed 8b:1,8b:32]
    python benchmarks/quantized.py --matmuls

With --train, a byte-level model of 25 million parameters is first trained on the source of the
Python standard library, into the new folder DIR; its loss must be below 1.2 nats a byte. Each
further argument is a set of settings to load the run's newest weights with; the first set is the
baseline of the others. Default: bfloat16, then with weights, cache, or both in int8, fp8 and int4.
A row of the data is prefilled like a prompt, with the cache of the settings; documents that share a
row are read as one text. Prints one JSON line for each set.

--speed also prints the new tokens per second of cases of decode.py in each of FORMATS. --matmuls
only prints the time of each matmul of an 8B model by its format and number of rows, on one NVIDIA
GPU.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode import run_in_process

from maxtext import LLM
from maxtext.inference.engine.cache_config import make_cache_config
from maxtext.kernels.decode import gemv
from maxtext.kernels.weight_matmul import transposed_matmul
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.layers.inputs import LayerInputs
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.data_loader import EvalDataLoader, open_eval_streams

WEIGHTS = {name: f"dtype=bfloat16,quantization={name}" for name in ("int8", "fp8", "int4")}
CACHES = {name: f"quantize_kvcache=true,kv_quant_dtype={name}" for name in WEIGHTS}
DEFAULT = [
    "dtype=bfloat16",
    *WEIGHTS.values(),
    *(f"dtype=bfloat16,{cache}" for cache in CACHES.values()),
    f"dtype=bfloat16,{CACHES['fp8']},kv_quant_axis=dkv",
    *(f"{WEIGHTS[name]},{CACHES[name]}" for name in WEIGHTS),
]
FORMATS = ("", ":int8", ":fp8", ":int4", ":fp8:fp8kv")  # of the cases of --speed
SMALL = (
    "base_emb_dim=512",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "head_dim=64",
    "base_mlp_dim=1536",
    "base_num_decoder_layers=8",
    "max_target_length=512",
    "per_device_batch_size=64",
    "dtype=bfloat16",
    "steps=1500",
    "checkpoint_period=1500",
    "max_num_checkpoints_to_keep=1",
    "eval_interval=1500",
    "num_epoch=20",
    "learning_rate=1.0e-3",
)
# [outputs, inputs] of an 8B model: packed QKV, output, packed gate-up, down, head
MATMULS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROWS = (1, 8, 16, 32, 64, 256, 2048)
COLD_BYTES = 4e8  # of the weights that are read in turn, so that caches hold none of them
MAX_LOSS = 1.2  # nats a byte: an untrained model hides the errors of its weights


def train(run: Path) -> None:
    where = (f"base_output_directory={run.parent}", f"run_name={run.name}")
    command = [sys.executable, "-m", "maxtext.train", "quickstart", *SMALL, *where]
    subprocess.run(command, check=True)


def batches(run: Path) -> Iterator[dict[str, np.ndarray]]:
    config = load(run / "config.yml", [], environ={})
    context = build_run_context(config)
    streams = open_eval_streams(context)
    if streams is None:
        raise SystemExit(f"{run} has no evaluation data: train with eval_interval above 0")
    count = config.eval_steps if config.eval_steps > 0 else None  # None: all batches
    for batch in itertools.islice(EvalDataLoader(context, streams, lambda batch: batch)(), count):
        yield {name: np.asarray(field) for name, field in batch.items()}


def perplexity(llm: LLM, data: list[dict[str, np.ndarray]]) -> float:
    def total_loss(weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The sum of the losses of all targets, and their number."""
        rows, length = batch["inputs"].shape
        cache_config = make_cache_config(llm.programs, rows, length)
        caches = llm.programs.runner.init_caches(cache_config)
        positions = jnp.where(batch["inputs_segmentation"] > 0, jnp.arange(length), -1)
        inputs = LayerInputs(
            positions,
            is_first_chunk=True,
            block_table=jnp.arange(rows)[:, None],
            contiguous=True,
        )
        model = llm.template.bind(weights)
        hidden, _ = model.step(batch["inputs"], inputs, caches)
        log_probs = jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))
        targets = batch["targets"][..., None]
        target_log_probs = jnp.take_along_axis(log_probs, targets, axis=-1)[..., 0]
        mask = batch["targets_segmentation"] > 0
        return -jnp.sum(target_log_probs * mask), jnp.sum(mask)

    step = jax.jit(total_loss)
    with llm.programs.context():
        sums = [step(llm.weights, batch) for batch in data]
    return math.exp(sum(float(loss) for loss, _ in sums) / sum(int(count) for _, count in sums))


def weight_bytes(weights: Any) -> int:
    """On the device, where two int4 values share a byte."""
    return (
        jax.jit(lambda weights: weights)
        .lower(weights)
        .compile()
        .memory_analysis()
        .argument_size_in_bytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--speed", default="")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--matmuls", action="store_true")
    options = parser.parse_args()
    if options.matmuls:
        return time_matmuls()
    if options.run is None:
        parser.error("name the folder of a run")
    if options.train:
        train(options.run)
    # Before this process takes the memory of the device.
    for case in filter(None, options.speed.split(",")):
        compare_speed(case, options.new)
    compare_perplexity(options.run, options.settings or DEFAULT, MAX_LOSS if options.train else 0)


def random_weight(name: str, columns: int, depth: int, seed: int) -> Any:
    """A transposed weight in a format; bfloat16 if it is empty."""
    bits = jax.random.bits(jax.random.key(seed), (columns, depth // 2), jnp.uint8)
    if name == "int4":
        return QuantizedWeight(bits, jnp.ones((columns, depth // 128)), "int4")
    values = jnp.concatenate([bits, bits], axis=1).astype(jnp.int8)
    if not name:
        return values.astype(jnp.bfloat16)
    dtype = jnp.int8 if name == "int8" else jnp.float8_e4m3fn
    return QuantizedWeight(values.astype(dtype), jnp.ones((columns, 1)))


def multiply(x: jax.Array, weight_T: Any) -> jax.Array:
    if isinstance(weight_T, QuantizedWeight):
        return transposed_matmul(x, weight_T, "gpu", True)
    return gemv.gemv(x[0], weight_T) if len(x) == 1 else x @ weight_T.T


def time_matmuls() -> None:
    for columns, depth in MATMULS:
        for name in ("", "int8", "fp8", "int4"):
            make = jax.jit(random_weight, static_argnums=(0, 1, 2))
            first = make(name, columns, depth, 0)
            num_bytes = sum(array.nbytes for array in jax.tree.leaves(first))
            count = max(3, round(COLD_BYTES / num_bytes))
            weights = [first, *(make(name, columns, depth, seed) for seed in range(1, count))]
            for rows in ROWS:
                x = jax.random.normal(jax.random.key(0), (rows, depth), jnp.bfloat16)
                run = jax.jit(lambda x, weights: [multiply(x, weight) for weight in weights])
                seconds = []
                for _ in range(6):
                    start = time.perf_counter()
                    jax.block_until_ready(run(x, weights))
                    seconds.append((time.perf_counter() - start) / count)
                best = min(seconds)
                result = {
                    "matmul": f"{depth} x {columns}",
                    "format": name or "bfloat16",
                    "rows": rows,
                    "microseconds": round(best * 1e6, 1),
                    "TB_a_second": round(num_bytes / best / 1e12, 2),
                    "TFLOP_a_second": round(2 * rows * columns * depth / best / 1e12, 1),
                }
                print(json.dumps(result), flush=True)


def compare_speed(case: str, new: int) -> None:
    baseline = None
    for name in FORMATS:
        try:
            own = run_in_process("ours", *f"{case}{name}".split(":"), "--new", new)
        except subprocess.CalledProcessError as error:
            print(json.dumps({"case": case + name, "error": str(error)}), flush=True)
            continue
        baseline = baseline or own
        result = {"case": case + name, "tokens_a_second": round(own, 1)}
        print(json.dumps(result | {"ratio": round(own / baseline, 2)}), flush=True)


def compare_perplexity(run: Path, sets: list[str], max_loss: float) -> None:
    """`max_loss` of the first set; 0: any."""
    data = list(batches(run))
    baseline = None
    for settings in sets:
        keys = dict(setting.split("=", 1) for setting in settings.split(","))
        keys = {"weight_dtype": keys.get("dtype", "float32")} | keys
        llm = LLM.load(run / "checkpoints", **keys)
        value = perplexity(llm, data)
        if baseline is None and max_loss and math.log(value) > max_loss:
            raise SystemExit(f"{run} has a loss of {math.log(value):.3f} nats: train it longer")
        baseline = baseline or value
        result = {
            "settings": settings,
            "perplexity": round(value, 4),
            "change": f"{value / baseline - 1:+.2%}",
            "weight_bytes": weight_bytes(llm.weights),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
