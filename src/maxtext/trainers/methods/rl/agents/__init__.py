"""Conversations of several turns in reinforcement learning: environments, tools, and tokens."""
