"""The losses of post-training, as pure functions of arrays: `from maxtext import losses`.

`sft`, `dpo`, `orpo`, `grpo` and `distill` return (loss, metrics); `divergence` returns the loss
alone. `logps`, `entropies`, `advantages`, `degenerate_groups`, `sampler_weights` and `anneal`
compute their arguments.
"""

from maxtext.trainers.losses.advantages import advantages, degenerate_groups
from maxtext.trainers.losses.common import entropies, logps, sft
from maxtext.trainers.losses.distill import anneal, distill, divergence
from maxtext.trainers.losses.grpo import grpo, sampler_weights
from maxtext.trainers.losses.preference import dpo, orpo

__all__ = [
    "advantages",
    "anneal",
    "degenerate_groups",
    "distill",
    "divergence",
    "dpo",
    "entropies",
    "grpo",
    "logps",
    "orpo",
    "sampler_weights",
    "sft",
]
