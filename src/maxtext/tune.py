"""Fine-tuning from Python: `tune.sft(model, data, **keys)`, `tune.dpo`, `tune.orpo`,
`tune.reward`, `tune.distill(student, teacher, data, **keys)` and
`tune.grpo(model, rows, rewards=[f], **keys)`. Each returns a `TuningRun`. `tune.encode` and
`tune.encode_pair` show the tokens of a row.
"""

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
