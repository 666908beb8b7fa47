"""Level 7: the training step, the loop around it, and what a run sets up first."""
