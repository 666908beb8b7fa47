"""Level 8: training.

train.py runs a configuration: its set-up (run_setup.py), then the train step (step.py) in the loop,
with hooks.
What a step minimizes is the Objective (objective.py) of the run's training method.

- losses: pure functions of arrays
- methods: a Method record for each training method, with its objective, rows and step
- checkpointing: initial, restored and saved states, exported models
- compilation, memory: compiled steps, and the memory that they need
"""
