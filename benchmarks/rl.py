"""A step of reinforcement learning on one GPU against TRL's GRPOTrainer, both with random weights.

    python benchmarks/rl.py [--case 8b] [--steps 4] [--peer-steps 5] [--no-peer] [--no-offline]

A step samples 8 completions for each of 32 prompts, scores them, and makes one update of a LoRA
adapter of rank 16 over a base in bfloat16. Prompts have 256 tokens, completions up to 512: random
weights hardly ever sample the end token, so that nearly all have 512. Ours is the command
`maxtext grpo`. The peer generates with transformers' `generate` in one batch and computes its
update in microbatches with gradient checkpointing, as TRL sets it. Neither has a reference
(beta 0). Each side runs in its own process.

The rate of generation is that of sampled tokens over the time of the rollout phase. It is compared
with benchmarks/decode.py --offline of the same shape, which decodes requests of mixed lengths.

- 8b: 32 prompts x 8 samples of an 8B shape.
- tiny: 2 prompts x 4 samples of a tiny shape, for CPUs.

Step times are medians without the first step, which compiles; `all_steps` has each. Memory is the
largest amount allocated. Prints one JSON line.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from finetune import (
    NUM_WORDS,
    RANK,
    TARGETS,
    peer_model,
    shape_keys,
    stub_datasets,
    write_tokenizer,
)

CASES: dict[str, dict[str, Any]] = {
    "8b": dict(
        shape="8b", prompts=32, samples=8, prompt=256, completion=512, offline=256,
        peer_rows=8, micro_batch=2,
        keys=["remat_policy=none"],
    ),
    "tiny": dict(
        shape="tiny", prompts=2, samples=4, prompt=16, completion=16, offline=8,
        peer_rows=4, micro_batch=1, keys=[],
    ),
}  # fmt: skip
PHASES = ("sync", "rollout", "score", "reward", "prepare", "update")
REWARD = '''
def checksum(prompts, completions, **columns):
    """A reward that the completions of a group hardly ever share."""
    return [sum(text.encode()) % 101 / 101 for text in completions]
'''


def write_prompts(path: Path, case: dict[str, Any], steps: int) -> list[dict[str, str]]:
    """Prompts of one length, of words that are one token each, and more than all steps read: a
    prompt that occurs twice in a batch would be prefilled once, by another program."""
    rng = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(case["prompt"]))}
        for _ in range(2 * case["prompts"] * steps)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def run_ours(case: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    write_prompts(folder / "rows.jsonl", case, steps)
    (folder / "reward.py").write_text(REWARD)
    settings = shape_keys(case["shape"]) | {
        "decoder_block": "llama2",
        "scan_layers": "false",
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "lora_rank": RANK,
        "batch_size": case["prompts"],
        "num_generations": case["samples"],
        "train_micro_batch_size": case["micro_batch"],
        "max_prefill_predict_length": case["prompt"],
        "max_target_length": case["prompt"] + case["completion"],
        "grpo_beta": 0,
        "learning_rate": 1e-6,
        "steps": steps,
        "reward_functions_path": folder / "reward.py",
        "reward_functions": "[checksum]",
        "num_test_batches": 0,
        "tokenizer_path": write_tokenizer(folder / "tokenizer"),
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "grain_train_files": folder / "rows.jsonl",
        "grain_worker_count": 0,
        "enable_checkpointing": "false",
        "enable_tensorboard": "false",
        "base_output_directory": folder,
        "run_name": "rl",
        "metrics_file": folder / "metrics.jsonl",
    }
    keys = [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "maxtext", "grpo", *keys, *case["keys"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return report_ours(case, records, folder / "rl" / "summary.json")


def report_ours(
    case: dict[str, Any], records: list[dict[str, Any]], summary: Path
) -> dict[str, Any]:
    all_steps = [round(record["step_time_seconds"], 2) for record in records]
    records = records[1:] or records
    phases = {
        phase: round(median(record[f"{phase}_seconds"] for record in records), 4)
        for phase in PHASES
    }
    seconds = median(record["step_time_seconds"] for record in records)
    length = median(record["completions/mean_length"] for record in records)
    peak = json.loads(summary.read_text())["peak_memory_bytes"]
    return {
        "step_seconds": round(seconds, 3),
        "all_steps": all_steps,
        "phases": phases,
        "sync_share": round(phases["sync"] / seconds, 5),
        "mean_length": length,
        "generated_tokens_per_second": round(
            case["prompts"] * case["samples"] * length / phases["rollout"], 1
        ),
        "logp_difference_max": max(record["sampling/logp_difference_max"] for record in records),
        "peak_gib": peak and round(peak / 2**30, 1),
    }


def run_peer(name: str, steps: int) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    stub_datasets()
    import datasets
    import peft
    import torch
    import transformers
    import trl

    case = CASES[name]
    on_gpu = torch.cuda.is_available()
    model = peer_model(case["shape"], case["prompt"] + case["completion"], "bfloat16")
    namespace: dict[str, Any] = {}
    exec(REWARD, namespace)
    times: list[float] = []
    generation: list[float] = []

    class Timer(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            times.append(time.perf_counter())

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    class Trainer(trl.GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            synchronize()
            generation.append(time.perf_counter() - start)
            return result

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            write_tokenizer(Path(folder) / "tokenizer")
        )
        rows = write_prompts(Path(folder) / "rows.jsonl", case, steps)
        completions = case["prompts"] * case["samples"]
        settings = trl.GRPOConfig(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=case["peer_rows"],
            gradient_accumulation_steps=completions // case["peer_rows"],
            num_generations=case["samples"],
            max_completion_length=case["completion"],
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            max_steps=steps,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            learning_rate=1e-6,
            optim="adamw_torch_fused",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            dataloader_num_workers=0,
        )
        trainer = Trainer(
            model=model,
            reward_funcs=namespace["checksum"],
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(
                r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM"
            ),
            callbacks=[Timer()],
        )
        started = time.perf_counter()
        trainer.train()
    steps_seconds = [after - before for before, after in itertools.pairwise([started, *times])]
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "loss" in log]
    rollout = median(generation[1:] or generation)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {
        "step_seconds": round(median(steps_seconds[1:] or steps_seconds), 3),
        "all_steps": [round(seconds, 2) for seconds in steps_seconds],
        "rollout_seconds": round(rollout, 3),
        "mean_length": median(lengths),
        "generated_tokens_per_second": round(completions * median(lengths) / rollout, 1),
        "peak_gib": peak and round(peak / 2**30, 1),
    }


def measure_peer(name: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--peer", name, "--peer-steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer of {name} failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_offline(case: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name("decode.py")
    requests, shape = str(case["offline"]), case["shape"]
    command = [sys.executable, script, "--cases", "", "--offline", requests]
    done = subprocess.run(
        [*command, "--offline-shape", shape], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])["offline"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="8b", choices=CASES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(run_peer(options.peer, options.peer_steps)))
        return
    case, result = CASES[options.case], {}

    def add(name: str, value: dict[str, Any]) -> None:
        result[name] = value
        print(name, value, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        add("ours", run_ours(case, options.steps, Path(folder)))
    if not options.no_offline:
        add("offline", measure_offline(case))
        rate = result["ours"]["generated_tokens_per_second"] / result["offline"]["tokens_a_second"]
        result["generation_to_offline"] = round(rate, 3)
    if not options.no_peer:
        add("peer", measure_peer(options.case, options.peer_steps))
        speedup = result["peer"]["step_seconds"] / result["ours"]["step_seconds"]
        result["speedup"] = round(speedup, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
