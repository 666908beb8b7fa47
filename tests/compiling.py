"""Compiler options for programs that run once or twice, whose compilation takes most of the time.

Optimization level 0 and the old CPU emitters compile about three times faster. jaxlib 0.11 removed
the old emitters, and refuses options that it does not know.
"""

import jax

FAST_COMPILE: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,  # tests run in parallel, so one thread each
}
if jax.__version_info__ < (0, 11):
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False

# The same for processes, as XLA_FLAGS.
FAST_COMPILE_FLAGS = " ".join(
    f"--{name}={str(value).lower()}" for name, value in FAST_COMPILE.items()
)
