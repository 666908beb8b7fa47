"""Rewards of completions: `rewards.score(completions, answers)`, `rewards.grade`,
`rewards.pass_at_k`."""

from maxtext.trainers.methods.rl.rewards.grading import grade, pass_at_k, score

__all__ = ["grade", "pass_at_k", "score"]
