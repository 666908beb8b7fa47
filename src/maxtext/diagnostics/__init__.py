"""Level 5: metrics and their writers, profiling, plots, and checks of the machine."""
