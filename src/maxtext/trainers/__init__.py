"""Level 7: training: data loading, losses, the step, the loop and its hooks, compilation."""
