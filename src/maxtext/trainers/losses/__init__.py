"""Losses of post-training: pure functions of arrays, without a configuration or a model.

`maxtext.losses` exports them. All compute in float32, whatever the dtype of the inputs, and work
under `jax.jit` and `jax.grad`. Options that choose a formula are Python values; coefficients such
as `beta` and `temperature` may be traced, unless a docstring says otherwise.

A mean divides by the number of tokens, rows or pairs in the arguments. `tokens`, `rows` and
`num_pairs` replace that number by that of a larger batch: then losses and metrics of its
microbatches sum to its own.
"""
