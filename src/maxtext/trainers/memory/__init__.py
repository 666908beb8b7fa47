"""The device memory of a run: estimated from shapes, and as the compiler counts it."""
