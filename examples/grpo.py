"""Reinforcement learning (GRPO and GSPO) from a reward alone, with three seeds each.

    python examples/grpo.py

SFT teaches the base model to sort letters, and to write half of its replies in capitals (dpo.py).
The task here is to sort in small letters, which this model does about half of the time. The reward
of a reply is 1 if it is the sorted word in small letters, else 0; no reply is shown to the model.
"""

import report
import sorting
from dpo import two_styles_model

from maxtext import LLM, tune

SEEDS = (0, 1, 2)
ALGORITHMS = {"GRPO": "grpo", "GSPO": "gspo-token"}
KEYS = {name: value for name, value in sorting.COMMON.items() if name != "per_device_batch_size"}
KEYS |= {
    "batch_size": 16,
    "num_generations": 8,
    "num_iterations": 2,  # with one update a batch, the ratio is 1 and both algorithms are the same
    "grpo_beta": 0.0,
    "learning_rate": 5e-4,
    "max_prefill_predict_length": 20,
    "max_target_length": 32,
    "num_test_batches": 0,
}


def is_sorted(prompts: list, completions: list[str], word: list[str], **columns: list) -> list:
    """The reward: 1 for the letters of `word` in their order, in small letters."""
    return [float(text == "".join(sorted(w))) for text, w in zip(completions, word, strict=True)]


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=48)
    start = two_styles_model(settings, sft_steps=8 * settings.steps)
    heldout = sorting.heldout_words(settings)
    rows = [
        {"prompt": sorting.prompt(word), "word": word} for word in sorting.training_words(settings)
    ]
    before = sorting.exact_match(LLM.load(start), heldout)
    runs = []
    with report.Stopwatch() as stopwatch:
        for name, loss_algo in ALGORITHMS.items():
            for seed in SEEDS:
                run = tune.grpo(
                    start,
                    rows,
                    rewards=[is_sorted],
                    loss_algo=loss_algo,
                    data_shuffle_seed=seed,
                    steps=settings.steps,
                    **KEYS,
                )
                after = sorting.exact_match(run.model, heldout)
                rewards = [metrics["reward"] for metrics in run.metrics]
                shares = {"before": before, "after": after}
                runs.append({"name": name, "seed": seed, **shares, "rewards": rewards})
                print(f"{name}, seed {seed}: {before:.1%} before, {after:.1%} after", flush=True)
    title = "Exact match on held-out words"
    report.save_seeds(
        settings.folder, "grpo", runs, stopwatch, title=title, plot="reinforcement.png"
    )


if __name__ == "__main__":
    main()
