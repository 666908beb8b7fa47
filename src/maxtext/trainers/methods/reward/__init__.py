"""Reward models: training on preference pairs, and scores for reinforcement learning."""
