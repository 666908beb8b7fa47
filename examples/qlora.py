"""An adapter over frozen weights in 4 bits (QLoRA), from Python.

python examples/qlora.py
"""

import report
import sorting

from maxtext import LLM, tune


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=250)
    base = sorting.base_model(settings)
    heldout = sorting.heldout_words(settings)
    rows = [sorting.conversation(word) for word in sorting.training_words(settings)]
    before = sorting.exact_match(LLM.load(base), heldout)

    with report.Stopwatch() as stopwatch:
        run = tune.sft(
            base,
            rows,
            lora_rank=16,
            lora_alpha=32,
            lora_weight_qtype="nf4",
            learning_rate=1e-2,
            steps=settings.steps,
            **sorting.COMMON,
        )

    after = sorting.exact_match(run.model, heldout)
    run.model.save_adapter(sorting.new_folder(settings, "qlora") / "adapter")
    losses = [metrics["loss"] for metrics in run.metrics]
    report.save_result(settings.folder, "qlora", before, after, stopwatch, losses)


if __name__ == "__main__":
    main()
