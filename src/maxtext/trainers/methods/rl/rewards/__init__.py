"""Rewards of completions in reinforcement learning and evaluation.

`maxtext.rewards` exports what works without a run. A module of the processes that compare answers
imports neither JAX nor other rooms, so that they start quickly.
"""
