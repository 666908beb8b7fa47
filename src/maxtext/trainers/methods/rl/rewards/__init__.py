"""Rewards of completions in reinforcement learning and evaluation.

`maxtext.rewards` exports what works without a run.
"""
