"""Fast compilation, in all tests and in the processes that they start.

Tests run most programs once or twice, so compilation takes most of their time. Optimization level 0
and the old CPU emitters compile about three times faster. jaxlib 0.11 removed the old emitters, and
refuses flags that it does not know.

A test that needs an optimized program passes `compiler_options` to jit, or starts a process with
other XLA_FLAGS.
"""

import os
from importlib.metadata import version

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


def cpu_devices(count: int, *flags: str) -> dict[str, str]:
    """Environment variables of a process with this number of CPU devices, and further XLA flags."""
    flags = (*FAST_COMPILE_FLAGS, f"--xla_force_host_platform_device_count={count}", *flags)
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
