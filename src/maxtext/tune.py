"""Fine-tuning from Python: `tune.sft(model, data, **keys)`, `tune.dpo`, `tune.orpo`,
`tune.reward`, `tune.distill`, `tune.grpo(model, rows, rewards=[f], **keys)`."""

from maxtext.trainers.tune import (
    TuningRun,
    distill,
    dpo,
    encode,
    encode_pair,
    grpo,
    orpo,
    reward,
    sft,
)

__all__ = ["TuningRun", "distill", "dpo", "encode", "encode_pair", "grpo", "orpo", "reward", "sft"]
