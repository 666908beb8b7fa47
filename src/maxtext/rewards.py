"""Rewards for completions that end in an answer: `rewards.score(completions, answers)` for each
completion, `rewards.grade(responses, answers)` for the responses to one problem, and
`rewards.pass_at_k(n, right, k)`.
"""

from maxtext.trainers.methods.rl.rewards.grading import grade, pass_at_k, score

__all__ = ["grade", "pass_at_k", "score"]
