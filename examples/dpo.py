"""Preferences: direct preference optimization (DPO) of a model that replies in two styles.

    python examples/dpo.py

SFT teaches the base model to sort letters, and to write half of its replies in capitals. DPO then
learns from pairs of replies, both correct, of which the one in capitals is preferred.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import report
import sorting

from maxtext import LLM, losses, tune

MAX_LENGTH = 32  # tokens of a prompt with its reply


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=100)
    start = two_styles_model(settings, sft_steps=4 * settings.steps)
    heldout = sorting.heldout_words(settings)
    pairs = [preference_pair(word) for word in sorting.training_words(settings)]
    before = measure(LLM.load(start), start, heldout)

    keys = sorting.COMMON | {"max_target_length": MAX_LENGTH, "per_device_batch_size": 32}
    with report.Stopwatch() as stopwatch:
        run = tune.dpo(
            start,
            pairs,
            lora_rank=16,
            dpo_beta=2.0,
            learning_rate=3e-4,
            steps=settings.steps,
            **keys,
        )

    after = measure(run.model, start, heldout)
    run.model.save_adapter(sorting.new_folder(settings, "dpo") / "adapter")
    report.save_preferences(settings.folder, before, after, stopwatch)


def two_styles_model(settings: sorting.Settings, sft_steps: int) -> Path:
    """The folder of the base model after SFT on replies in both styles."""
    folder = settings.folder / "two_styles"
    if not folder.is_dir():
        pairs = [preference_pair(word) for word in sorting.training_words(settings)]
        rows = [
            {"messages": pair["prompt"] + pair[style]}
            for pair in pairs
            for style in ("chosen", "rejected")
        ]
        keys = sorting.COMMON | {"steps": sft_steps, "learning_rate": 3e-3}
        run = tune.sft(sorting.base_model(settings), rows, **keys)
        run.model.save_hf(folder)
    return folder


def preference_pair(word: str) -> dict[str, Any]:
    """A row for `maxtext dpo`."""
    text = "".join(sorted(word))
    return {
        "prompt": sorting.prompt(word),
        "chosen": sorting.reply(text.upper()),
        "rejected": sorting.reply(text),
    }


def measure(llm: LLM, tokenizer: Path, words: list[str]) -> dict[str, Any]:
    """`margins`: log p(chosen) − log p(rejected) of each word. `preferred` and `correct`: the
    shares of replies, sampled with temperature 1, that are in capitals, and that are sorted."""
    replies = sorting.generate(llm, words, temperature=1.0)
    answers = ["".join(sorted(word)) for word in words]
    correct = [text.lower() == answer for text, answer in zip(replies, answers, strict=True)]
    pairs = [tune.encode_pair(preference_pair(word), tokenizer=tokenizer) for word in words]
    margins = reply_logps(llm, pairs, "chosen") - reply_logps(llm, pairs, "rejected")
    return {
        "margins": margins.tolist(),
        "preferred": float(np.mean([text.isupper() for text in replies])),
        "correct": float(np.mean(correct)),
    }


def reply_logps(llm: LLM, pairs: list[dict[str, list[int]]], side: str) -> np.ndarray:
    """The log-probability of a reply to each prompt."""
    ids = np.zeros((len(pairs), MAX_LENGTH + 1), np.int32)
    is_reply = np.zeros_like(ids)
    for row, pair in enumerate(pairs):
        start, end = len(pair["prompt"]), len(pair["prompt"]) + len(pair[side])
        ids[row, :end] = pair["prompt"] + pair[side]
        is_reply[row, start:end] = 1
    logps = losses.logps(llm.logits(ids[:, :-1]), jnp.asarray(ids[:, 1:]))
    return np.asarray((logps * is_reply[:, 1:]).sum(-1))


if __name__ == "__main__":
    main()
