"""Fine-tuning from Python: `tune.sft(model, data, **keys)`, `tune.dpo`, `tune.orpo`."""

from maxtext.trainers.tune import TuningRun, dpo, orpo, sft

__all__ = ["TuningRun", "dpo", "orpo", "sft"]
