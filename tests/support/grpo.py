"""Runs of GRPO on sums."""

import json

BYTES = 259  # ids of the byte tokenizer
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]
RUN = dict(
    tokenizer_path="byte",
    num_generations=4,
    batch_size=2,
    num_batches=2,
    max_prefill_predict_length=8,
    max_target_length=14,
    enable_data_shuffling=False,
    dtype="float32",
    matmul_precision="highest",
    scan_layers=False,
    remat_policy="none",
    attention="dot_product",
    gradient_clipping_threshold=0.0,
    enable_tensorboard=False,
)


def share_of_low_bytes(prompts, completions, **columns):
    """A reward that the completions of a group hardly ever share."""
    codes = [text.encode("utf-8", "replace") for text in completions]
    return [sum(byte < 80 for byte in code) / max(len(code), 1) for code in codes]


def rollouts_of(run):
    lines = (run.folder / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
