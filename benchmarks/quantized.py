"""The perplexity of quantized models, on the eval_steps batches of a run, and the memory of their
weights.

    maxtext train quickstart
    python benchmarks/quantized.py maxtext_output/quickstart [KEY=VALUE[,KEY=VALUE…] …]

Each further argument is a set of settings to load the run's newest weights with; the first set is
the baseline of the others. Default: bfloat16, then with weights, cache, or both in int8 and int4. A
row of the data is prefilled like a prompt, with the cache of the settings; documents that share a
row are read as one text. Prints one JSON line for each set.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext import LLM
from maxtext.inference.engine.cache_config import make_cache_config
from maxtext.layers.inputs import LayerInputs
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.data_loader import EvalDataLoader, open_eval_streams

INT8, INT4 = (
    "quantize_kvcache=true,kv_quant_dtype=int8",
    "quantize_kvcache=true,kv_quant_dtype=int4",
)
DEFAULT = [
    "dtype=bfloat16",
    "dtype=bfloat16,quantization=int8",
    "dtype=bfloat16,quantization=int4",
    f"dtype=bfloat16,{INT8}",
    f"dtype=bfloat16,{INT4}",
    f"dtype=bfloat16,quantization=int8,{INT8}",
    f"dtype=bfloat16,quantization=int4,{INT4}",
]


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
    parser.add_argument("run", type=Path)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    data = list(batches(options.run))
    baseline = None
    for settings in options.settings or DEFAULT:
        keys = dict(setting.split("=", 1) for setting in settings.split(","))
        keys = {"weight_dtype": keys.get("dtype", "float32")} | keys
        llm = LLM.load(options.run / "checkpoints", **keys)
        value = perplexity(llm, data)
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
