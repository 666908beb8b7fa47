"""A low-rank adapter (LoRA) over frozen weights, by the command `maxtext sft`.

python examples/lora.py
"""

import report
import sorting

from maxtext import LLM


def main() -> None:
    settings = sorting.parse_arguments(__doc__, steps=250)
    base = sorting.base_model(settings)
    heldout = sorting.heldout_words(settings)
    rows = [sorting.conversation(word) for word in sorting.training_words(settings)]
    before = sorting.exact_match(LLM.load(base), heldout)

    folder = sorting.new_folder(settings, "lora")  # the run in an old one would be resumed
    with report.Stopwatch() as stopwatch:
        sorting.run_command(
            "sft",
            {
                "load_parameters_path": base,
                "dataset_type": "grain",
                "grain_file_type": "jsonl",
                "grain_train_files": sorting.write_jsonl(settings.folder / "chats.jsonl", rows),
                "lora_rank": 16,
                "lora_alpha": 32,
                "learning_rate": 1e-2,
                "steps": settings.steps,
                "base_output_directory": settings.folder,
                "run_name": "lora",
                "metrics_file": folder / "metrics.jsonl",
                **sorting.COMMON,
            },
        )

    after = sorting.exact_match(LLM.load(base, adapters=[folder / "adapter"]), heldout)
    losses = report.read_losses(folder / "metrics.jsonl")
    report.save_result(settings.folder, "lora", before, after, stopwatch, losses)


if __name__ == "__main__":
    main()
