"""A ragged all-to-all on one device."""

import jax
import jax.numpy as jnp


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """One slice for each device. NaN everywhere if the two sides disagree on its size."""
    arrays = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, targets = (jax.lax.all_gather(array, axis_name) for array in arrays)
    rank, indices = jax.lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(operands)):
        size, start, target = (array[source, rank] for array in (sizes, starts, targets))
        received = (indices >= target) & (indices < target + size)
        sent = jnp.take(
            operands[source], indices - target + start, axis=0, mode="fill", fill_value=jnp.nan
        )
        output = jnp.where(received[:, None], sent, output)
        output = jnp.where(size == recv_sizes[source], output, jnp.nan)
    return output
