"""Distillation from a teacher: online, from stored logits, and on-policy (GKD)."""
