"""Arrays restored from the blocks on a process's own disk."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.local_checkpoints import assemble, block_name
from maxtext.checkpoint.tensors import TensorInfo
from maxtext.common.errors import UserError

NAME = ("weights", "bias")


def folder_of(values):
    block = block_name(NAME, tuple((0, size) for size in values.shape))
    return SimpleNamespace(
        tensors={block: TensorInfo(values.dtype, values.shape)}, read=lambda name: values
    )


def wanted(dtype):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct((3,), dtype, sharding=sharding)


def test_a_bfloat16_block_becomes_float32():
    """As that of a router's bias in a step that was saved before the bias was float32."""
    values = np.array([0.5, -0.25, 3.0], ml_dtypes.bfloat16)
    array = assemble(folder_of(values), NAME, wanted(jnp.float32))
    assert array.dtype == jnp.float32
    np.testing.assert_array_equal(array, values.astype(np.float32))


@pytest.mark.parametrize(("saved", "dtype"), [(np.float32, jnp.bfloat16), (np.int32, jnp.float32)])
def test_block_that_would_be_narrowed_raises(saved, dtype):
    with pytest.raises(UserError, match="and this run has"):
        assemble(folder_of(np.ones(3, saved)), NAME, wanted(dtype))
