"""Fine-tuning from Python: `tune.sft(model, data, **keys)`, `tune.dpo`, `tune.orpo`."""

from maxtext.trainers.tune import TuningRun, dpo, encode, encode_pair, orpo, sft

__all__ = ["TuningRun", "dpo", "encode", "encode_pair", "orpo", "sft"]
