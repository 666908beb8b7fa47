"""How long an asynchronous save holds a training run, against a save that the run waits for.

    python benchmarks/checkpoint.py [--megabytes 300]

A small model with a wide vocabulary trains with AdamW in float32, so that weights and moments have
the given size. Both kinds of save are measured in the same run, in turn, three times, and the
median of each counts. Blocking: from the call until the checkpoint is complete. Stall: how long the
loop is held by the call of an asynchronous save. Beside it stands how much longer than usual the
step after it takes: on a CPU it shares the cores with the threads that write, and gets new memory
where the save still reads the old; an accelerator's step does neither. Prints one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax

from maxtext.checkpoint.manager import CheckpointManager, StorageOptions
from maxtext.checkpoint.open import model_text
from maxtext.checkpoint.state import to_flat_dict
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.checkpointing.save import describe_run, tree_to_save
from maxtext.trainers.compilation.compile import compile_train_step
from maxtext.trainers.data_loader import TrainDataLoader

WIDTH, REPEATS = 256, 3


def overrides(megabytes: int) -> list[str]:
    # Embedding and head are nearly all of the weights; with the two moments there are six such
    # arrays of float32.
    vocabulary = megabytes * 10**6 // (6 * 4 * WIDTH)
    return [
        "run_name=checkpoint", "dataset_type=synthetic", f"base_emb_dim={WIDTH}",
        "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=64", "base_mlp_dim=256",
        "base_num_decoder_layers=2", f"vocab_size={vocabulary}", "max_target_length=16",
        "per_device_batch_size=1", "dtype=float32", "remat_policy=none", "enable_tensorboard=false",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=300)
    config = load(None, overrides(parser.parse_args().megabytes), environ={})
    context = build_run_context(config)
    data_loader = TrainDataLoader(context)
    state, step = (
        initial_state(context),
        compile_train_step(context, config.global_batch_size_to_train_on),
    )
    size = sum(array.nbytes for array in to_flat_dict(state).values())

    def train() -> float:
        nonlocal state
        batch = next(data_loader).fields
        begin = time.perf_counter()
        state, _ = step(state, batch, context.key)
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    usual = statistics.median([train() for _ in range(12)][2:])
    blocking, stalls, slower = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(Path(folder), StorageOptions.of(config), max_to_keep=1)

        def save(number: int) -> float:
            begin = time.perf_counter()
            position = data_loader.source.get_state()
            manager.save(
                number,
                tree_to_save(context, state, context.key),
                describe_run(context, number),
                model_text(config),
                position,
            )
            return time.perf_counter() - begin

        for number in range(2 * REPEATS + 2):
            train()
            begin = time.perf_counter()
            call = save(number)
            if number % 2:
                manager.wait()
                blocking.append(time.perf_counter() - begin)
            else:
                stalls.append(call)
                slower.append(train() - usual)
                manager.wait()
        manager.close()
    data_loader.close()
    # The first of each kind warms up files and threads.
    stall, blocking_seconds = statistics.median(stalls[1:]), statistics.median(blocking[1:])
    print(
        json.dumps(
            {
                "state_mb": round(size / 1e6),
                "step_ms": round(usual * 1e3, 1),
                "blocking_save_ms": round(blocking_seconds * 1e3, 1),
                "async_stall_ms": round(stall * 1e3, 1),
                "stall_ratio": round(stall / blocking_seconds, 4),
                "next_step_slower_ms": round(statistics.median(slower[1:]) * 1e3, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
