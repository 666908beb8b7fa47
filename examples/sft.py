"""Supervised fine-tuning of all weights, from Python.

python examples/sft.py
"""

import report
import sorting

from maxtext import LLM, tune


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=200)
    base = sorting.base_model(settings)
    heldout = sorting.heldout_words(settings)
    rows = [sorting.conversation(word) for word in sorting.training_words(settings)]
    before = sorting.exact_match(LLM.load(base), heldout)

    with report.Stopwatch() as stopwatch:
        run = tune.sft(base, rows, steps=settings.steps, learning_rate=3e-3, **sorting.COMMON)

    after = sorting.exact_match(run.model, heldout)
    losses = [metrics["loss"] for metrics in run.metrics]
    report.save_result(settings.folder, "sft", before, after, stopwatch, losses)


if __name__ == "__main__":
    main()
