"""Level 7: training.

train.py runs a configuration: RunContext, data loader, train step (step.py), loop and hooks.
What a step minimizes is an Objective (objective.py), which build_objective.py chooses by the keys.

- losses: pure functions of arrays
- preference, distillation, rl: objectives and steps of post-training
- checkpointing: initial, restored and saved states, exported models
- compilation, memory: compiled steps, and the memory that they need
- pre_train, post_train: commands at their paths in MaxText
"""
