"""Fast compilation, in all tests and in the processes that they start.

Tests run most programs once or twice, so compilation takes most of their time. Optimization level 0
and the old CPU emitters compile about three times faster. jaxlib 0.11 removed the old emitters, and
refuses flags that it does not know.

A test that needs an optimized program passes `compiler_options` to jit, or starts a process with
other XLA_FLAGS.
"""

import itertools
import os
from importlib.metadata import version

from jax._src.interpreters import mlir

from maxtext.common.processes import has_gpu

FAST_COMPILE_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # tests run in parallel, so one thread each
    *(
        ["--xla_cpu_use_fusion_emitters=false"]
        if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
        else []
    ),
)


def compile_fast() -> None:
    """Set XLA_FLAGS, which JAX reads when it initializes its first backend."""
    if not has_gpu():
        given = os.environ.get("XLA_FLAGS", "").split()
        missing = [flag for flag in FAST_COMPILE_FLAGS if flag not in given]
        os.environ["XLA_FLAGS"] = " ".join([*given, *missing])


def reuse_mlir_contexts(programs: int = 256) -> None:
    """Lower this number of programs in one MLIR context.

    JAX creates a context for each program, which takes longer than lowering a small program. A
    context keeps its constants, so it is replaced from time to time.
    """
    create, count = mlir.make_ir_context, itertools.count()
    context = None

    def shared_context():
        nonlocal context
        if next(count) % programs == 0:
            context = create()
        return context

    mlir.make_ir_context = shared_context


def cpu_devices(count: int, *flags: str) -> dict[str, str]:
    """Environment variables of a process with this number of CPU devices, and further XLA flags."""
    flags = (*FAST_COMPILE_FLAGS, f"--xla_force_host_platform_device_count={count}", *flags)
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
