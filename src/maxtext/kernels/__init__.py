"""Level 2: arrays in, arrays out, no configuration: the kernels and matmuls that layers use."""
