"""Fine-tuning from Python: `tune.sft(model, data, **keys)`, `tune.dpo`, `tune.orpo`,
`tune.distill`."""

from maxtext.trainers.tune import TuningRun, distill, dpo, encode, encode_pair, orpo, sft

__all__ = ["TuningRun", "distill", "dpo", "encode", "encode_pair", "orpo", "sft"]
