"""Reinforcement learning: rollouts, rewards, and policy updates by GRPO and GSPO."""
