"""Reinforcement learning with a tool: a model that cannot multiply learns to call a calculator,
with three seeds.

    python examples/tools.py

Supervised fine-tuning shows a tiny model two ways to answer "37*54": to guess, which is wrong, and,
less often, to call the tool and repeat its result. GRPO rewards right answers alone.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import report
import sorting

from maxtext import LLM, tune

SPECIAL_TOKENS = ["<pad>", "</s>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
BOXED = "\\boxed{"
VOCABULARY = [*SPECIAL_TOKENS, *CALL, BOXED, "}", "*", *"0123456789"]
# The comment says in which form this model calls tools.
CHAT_TEMPLATE = "{# <tool_call> #}" + sorting.CHAT_TEMPLATE
SHARE_OF_CALLS = 0.3
SEEDS = (0, 1, 2)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a * b


def right(prompts: Any, completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: whether a conversation ends with the right answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.endswith(f"{BOXED}{number}}}")) for text, number in pairs]


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return [{"question": f"{a}*{b}", "answer": str(a * b), "a": a, "b": b} for a, b in pairs]


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows for supervised fine-tuning: some call the tool, the others guess."""
    rng = random.Random(1)
    rows = []
    for problem in problems(count, seed=1):
        messages = [{"role": "user", "content": problem["question"]}]
        result = problem["answer"]
        if rng.random() < SHARE_OF_CALLS:
            call = f"{CALL[0]}{problem['a']}{CALL[1]}{problem['b']}{CALL[2]}"
            messages.append({"role": "assistant", "content": call})
            messages.append({"role": "tool", "content": result})
        else:
            result = str(rng.randint(100, 9999))
        messages.append({"role": "assistant", "content": f"{BOXED}{result}}}"})
        rows.append({"messages": messages})
    return rows


def write_tokenizer(folder: Path) -> Path:
    """A token for each digit and for each part of a call."""
    pattern = "|".join([*map(re.escape, (*CALL, BOXED)), "."])
    return sorting.write_tokenizer(folder, VOCABULARY, SPECIAL_TOKENS, pattern, CHAT_TEMPLATE)


def fine_tuned_model(settings: sorting.Settings) -> Path:
    """The folder of the model that knows the form of calls."""
    tokenizer = write_tokenizer(settings.folder / "tools_tokenizer")
    rows = sorting.write_jsonl(settings.folder / "tools.jsonl", conversations(settings.rows))
    run = sorting.new_folder(settings, "tools_sft")
    keys = {
        **sorting.MODEL,
        **sorting.COMMON,
        "vocab_size": len(VOCABULARY),
        "tokenizer_path": tokenizer,
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "grain_train_files": rows,
        "learning_rate": 3e-3,
        "steps": settings.base_steps,
        "base_output_directory": settings.folder,
        "run_name": "tools_sft",
    }
    sorting.run_command("sft", keys)
    folder = sorting.new_folder(settings, "tools_base")
    LLM.load(run).save_hf(folder)
    write_tokenizer(folder)
    return folder


def train(settings: sorting.Settings, base: Path, heldout: Path, seed: int) -> dict[str, Any]:
    """The rewards of a run, and the share of right answers to held-out problems before and after
    it."""
    metrics_file = sorting.new_folder(settings, f"tools_{seed}") / "metrics.jsonl"
    run = tune.grpo(
        base,
        problems(settings.rows, seed=3),
        rewards=[right],
        tools=[multiply],
        data_shuffle_seed=seed,
        steps=settings.steps,
        batch_size=8,
        num_generations=8,
        learning_rate=1e-3,
        grpo_beta=0.0,
        max_prefill_predict_length=16,
        grain_eval_files=str(heldout),
        num_test_batches=-1,
        eval_sampling_strategy="warm",
        generation_configs={"warm": {"eval_temperature": 1.0, "eval_top_k": 0}},
        metrics_file=str(metrics_file),
        **sorting.COMMON | {"max_target_length": 48},
    )
    records = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    shares = [record["eval_accuracy"] for record in records if "eval_accuracy" in record]
    rewards = [metrics["reward"] for metrics in run.metrics]
    return {"before": shares[0], "after": shares[-1], "rewards": rewards}


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=30, base_steps=400)
    base = fine_tuned_model(settings)
    heldout = sorting.write_jsonl(
        settings.folder / "tools_heldout.jsonl", problems(settings.heldout, seed=2)
    )
    runs = []
    with report.Stopwatch() as stopwatch:
        for seed in SEEDS:
            result = train(settings, base, heldout, seed)
            runs.append({"name": "GRPO", "seed": seed, **result})
            print(
                f"seed {seed}: {result['before']:.1%} before, {result['after']:.1%} after",
                flush=True,
            )
    title = "Right answers to held-out problems"
    report.save_seeds(settings.folder, "tools", runs, stopwatch, title=title, plot="tools.png")


if __name__ == "__main__":
    main()
