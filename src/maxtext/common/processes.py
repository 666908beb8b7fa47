"""Process start-up: joins the other processes of the run, before JAX is asked for devices.

`rendezvous.detect` reads this process's index from the environment; `start` calls
`jax.distributed`. JAX aborts the process when a peer dies (detected within HEARTBEAT_SECONDS). That
is wanted: the collectives of a step cannot continue, and the launcher restarts the run. JAX also
aborts when start-up takes too long; `exit_on_timeout` reports that first.

Also sets the process's limit of file descriptors, and keeps Python's garbage collector out of
processes that run for long.
"""

import contextlib
import gc
import importlib.util
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.rendezvous import Rendezvous, detect

HEARTBEAT_SECONDS = 10
# The start time in the run's name: the same in all processes, and after a restart.
STARTED = "MAXTEXT_STARTED"
# The number of processes that an elastic run started with; it may continue with fewer.
FULL_PROCESSES = "MAXTEXT_FULL_PROCESSES"
GPU_PLATFORMS = ("gpu", "cuda", "rocm")
# Settings for JAX on GPUs, unless the environment has others. A run has its GPUs to itself, but JAX
# would leave a quarter of their memory unused: gpu_memory_utilization replaces the fraction. cuBLAS
# is the fastest for large matmuls, and autotuning against Triton takes seconds of compilation.
MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
GPU_DEFAULTS = {
    MEMORY_FRACTION: "0.95",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
}
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # an alias; JAX refuses both together


@dataclass(frozen=True)
class World:
    """This process, `index` of `count`."""

    index: int = 0
    count: int = 1


def has_tpu() -> bool:
    """Whether this machine has TPU chips and libtpu."""
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def memory_setting(environ: Mapping[str, str], fraction: float | None = None) -> dict[str, str]:
    """The part of a GPU's memory that JAX takes: that of the environment, else `fraction`."""
    if environ.get(OLD_FRACTION):
        return {OLD_FRACTION: environ[OLD_FRACTION]}
    default = GPU_DEFAULTS[MEMORY_FRACTION] if fraction is None else f"{fraction:g}"
    return {MEMORY_FRACTION: environ.get(MEMORY_FRACTION) or default}


def limit_gpu_memory(fraction: float, environ: Mapping[str, str] = os.environ) -> None:
    """Let JAX take this part of a GPU's memory, unless the environment has another or JAX has
    begun."""
    if has_gpu():
        os.environ.update(memory_setting(environ, fraction))


def gpu_settings(environ: Mapping[str, str], fraction: float | None = None) -> dict[str, str]:
    """GPU_DEFAULTS, with this part of the memory, overridden by the environment; XLA_FLAGS of both
    are merged."""
    settings = {name: environ.get(name) or value for name, value in GPU_DEFAULTS.items()}
    del settings[MEMORY_FRACTION]
    settings |= memory_setting(environ, fraction)
    flags = environ.get("XLA_FLAGS", "").split()
    if all(flag.startswith("-") for flag in flags):  # else it is the path of a file with flags
        names = {flag.partition("=")[0] for flag in flags}
        defaults = GPU_DEFAULTS["XLA_FLAGS"].split()
        missing = [flag for flag in defaults if flag.partition("=")[0] not in names]
        settings["XLA_FLAGS"] = " ".join([*flags, *missing])
    return settings


class StartSettings(Protocol):
    """The configuration keys of process start-up."""

    @property
    def hardware(self) -> str: ...

    @property
    def gpu_memory_utilization(self) -> float: ...

    @property
    def jax_distributed_initialization_timeout(self) -> int: ...

    @property
    def skip_jax_distributed_system(self) -> bool: ...


_WORLD = World()


def world() -> World:
    """The index of this process and the number of processes; (0, 1) before `start`."""
    return _WORLD


def start(config: StartSettings, environ: Mapping[str, str] = os.environ) -> World:
    """Join the other processes, if any, and select the platform of `hardware`."""
    global _WORLD
    rendezvous = None if is_initialized() else detect(environ, has_tpu())
    if rendezvous is not None and config.skip_jax_distributed_system:
        if rendezvous.count is not None:
            raise ConfigError(
                f"skip_jax_distributed_system=true, but {rendezvous.source} calls this process "
                f"{rendezvous.index} of {rendezvous.count}: set it to false, or start one process"
            )
        rendezvous = None
    choose_platform(config.hardware)
    if has_gpu():
        os.environ.update(gpu_settings(environ, config.gpu_memory_utilization))
    if rendezvous is not None:
        initialize_distributed(rendezvous, config.jax_distributed_initialization_timeout)
    if is_initialized():
        import jax

        _WORLD = World(jax.process_index(), jax.process_count())
        broadcast_start_time()
    check_platform(config.hardware)
    return _WORLD


def preallocate_gpu_memory() -> None:
    """Start JAX's preallocation of GPU memory in a thread.

    It happens with the first array and takes seconds on a large GPU; the host can work meanwhile.
    """
    import jax

    def allocate() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the next allocation raises it again
            for device in jax.local_devices():
                jax.device_put(0, device)

    if jax.default_backend() == "gpu":
        threading.Thread(target=allocate).start()


def is_initialized() -> bool:
    """Whether this process has joined, here or in the program that imports this package."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def initialize_distributed(rendezvous: Rendezvous, timeout: int) -> None:
    """Join the other processes. Exits after `timeout` seconds with an error message."""
    import jax

    if rendezvous.index == 0 and rendezvous.coordinator:
        check_port(rendezvous.coordinator)
    coordinator = rendezvous.coordinator or "the coordinator that JAX found"
    is_known = rendezvous.index is not None
    process = f"process {rendezvous.index} of {rendezvous.count}: " if is_known else ""
    timer = threading.Timer(
        timeout, exit_on_timeout, [process, coordinator, timeout, rendezvous.index == 0]
    )
    timer.daemon = True
    timer.start()
    # The service would handle SIGTERM; the training loop has its own handler.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=rendezvous.coordinator,
            num_processes=rendezvous.count,
            process_id=rendezvous.index,
            local_device_ids=rendezvous.local_device_ids,
            cluster_detection_method="deactivate" if rendezvous.coordinator else None,
            initialization_timeout=timeout + 60,  # later than the timer: JAX aborts
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{process}cannot join the other processes at {coordinator}: {error}"
        ) from error
    finally:
        timer.cancel()


def exit_on_timeout(process: str, coordinator: str, timeout: int, is_first: bool) -> None:
    reason = (
        "not all other processes connected: see their logs"
        if is_first
        else "no answer, or not all processes connected: check that process 0 runs there, "
        "and that its port can be reached from here"
    )
    print(
        f"maxtext: error: {process}could not join the other processes at {coordinator} "
        f"in {timeout} s, {reason}; jax_distributed_initialization_timeout sets the time",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def check_port(address: str) -> None:
    """Raise UserError if process 0 cannot listen at the address; JAX would crash."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {address}: {error}; choose another port"
            ) from error


def broadcast_start_time() -> None:
    """Set STARTED to process 0's clock in all processes, for the name of the run."""
    if STARTED in os.environ or _WORLD.count == 1:
        return
    import numpy as np
    from jax.experimental import multihost_utils

    local = np.array([int(part) for part in now().split("-")], np.int32)
    day, clock = multihost_utils.broadcast_one_to_all(local).tolist()
    os.environ[STARTED] = f"{day:08d}-{clock:06d}"


def now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def choose_platform(hardware: str) -> None:
    """hardware=cpu ignores accelerators. The default, tpu, takes JAX's default platform."""
    if hardware == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")


def check_platform(hardware: str) -> None:
    """Raise ConfigError if JAX does not run on the platform of `hardware`."""
    if hardware == "tpu":
        return
    import jax

    backend = jax.default_backend()
    if hardware == "cpu" and backend != "cpu":
        raise ConfigError(
            f"hardware=cpu, but JAX runs on {backend} already: "
            "set JAX_PLATFORMS=cpu before it starts"
        )
    if hardware.startswith("gpu") and backend not in GPU_PLATFORMS:
        raise ConfigError(
            f"hardware={hardware}, but JAX finds no GPU, only {backend}: `maxtext doctor` says why"
        )
    if hardware == "gpu_multiprocess" and _WORLD.count == 1:
        raise ConfigError(
            "hardware=gpu_multiprocess, but this is the only process: start several with "
            "`maxtext launch --local N`, srun or mpirun, or set hardware=gpu"
        )


def exit_process(code: int, before_exit: Callable[[], None] | None = None) -> int:
    """Return the exit code of a failed process; in a run of several processes, exit at once.

    A regular exit of JAX waits for the other processes, which wait for this one. `before_exit` is
    called only where the process exits here.
    """
    if _WORLD.count > 1:
        if before_exit is not None:
            before_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def raise_descriptor_limit() -> None:
    """Every connection needs a file descriptor: allow as many as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def freeze_objects() -> None:
    """Leave all objects that exist now out of later collections. For a process that has loaded and
    compiled what it needs: a collection stops all threads, and would visit millions of objects that
    live as long as the process."""
    gc.collect()
    gc.freeze()
