"""Contexts of a GPU for tests on a CPU, whose Triton kernels are interpreted."""

from contextlib import contextmanager

import pytest
from jax.experimental import pallas as pl

from maxtext.kernels.decode import gemv, small_batch_matmul
from maxtext.layers import moe


@contextmanager
def interpreted_kernels():
    """Triton kernels are interpreted; yields the set of the names of those that ran."""
    names = set()

    def interpret(*args, run=pl.pallas_call, **options):
        names.add(options["name"].removeprefix("decode_"))
        return run(*args, **options | {"interpret": True})

    def without_assembly(call):
        return lambda *args, **options: call(*args, **options | {"interpret": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", interpret)
        patch.setattr(gemv, "gemv_call", without_assembly(gemv.gemv_call))
        run = small_batch_matmul.small_batch_matmul
        patch.setattr(small_batch_matmul, "small_batch_matmul", without_assembly(run))
        patch.setattr(moe, "expert_matmul", without_assembly(moe.expert_matmul))
        yield names
