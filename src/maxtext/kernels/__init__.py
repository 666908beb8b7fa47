"""Level 2: arrays in, arrays out, no configuration: the products and kernels that layers are made
of.
"""
