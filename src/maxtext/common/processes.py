"""Process start-up: how this process joins the other processes of its run, before any device is
counted.

`rendezvous.plan` says from the environment who we are; `start` carries that out with
`jax.distributed`. JAX aborts the process when a peer dies (noticed within HEARTBEAT_SECONDS), which
is what we want: the collectives of a step cannot go on, and whoever started us starts us again. It
aborts, too, when start-up takes too long; that we turn into a sentence.
"""

import contextlib
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.rendezvous import Rendezvous, plan

HEARTBEAT_SECONDS = 10
# when the run began, for its name: the same in all processes, and after a restart
STARTED = "MAXTEXT_STARTED"
FULL_PROCESSES = (
    "MAXTEXT_FULL_PROCESSES"  # of an elastic run that goes on with fewer: how many it began with
)
GPU_PLATFORMS = ("gpu", "cuda", "rocm")
# What a run on GPUs tells JAX, unless the environment does. It has its GPUs to itself; JAX would
# leave a quarter of their memory. Of large products cuBLAS has the fastest, and finding that out
# takes the compiler seconds.
GPU_DEFAULTS = {
    "XLA_CLIENT_MEM_FRACTION": "0.95",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
}
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX knows it, too, but does not take both


@dataclass(frozen=True)
class World:
    """This process, `index` of `count`."""

    index: int = 0
    count: int = 1


def tpu_is_here() -> bool:
    """Chips, and the library that drives them."""
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def gpu_is_here() -> bool:
    """NVIDIA's driver and a card."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """GPU_DEFAULTS, or what the environment says instead; flags are added to those that it has."""
    settings = {name: environ.get(name) or value for name, value in GPU_DEFAULTS.items()}
    if environ.get(OLD_FRACTION):
        del settings["XLA_CLIENT_MEM_FRACTION"]
        settings[OLD_FRACTION] = environ[OLD_FRACTION]
    given = environ.get("XLA_FLAGS", "").split()
    if all(flag.startswith("-") for flag in given):  # else it is a file that has them
        names = {flag.partition("=")[0] for flag in given}
        ours = [
            flag
            for flag in GPU_DEFAULTS["XLA_FLAGS"].split()
            if flag.partition("=")[0] not in names
        ]
        settings["XLA_FLAGS"] = " ".join([*given, *ours])
    return settings


class StartSettings(Protocol):
    """The keys of process start-up: a whole configuration, or these alone."""

    @property
    def hardware(self) -> str: ...

    @property
    def jax_distributed_initialization_timeout(self) -> int: ...

    @property
    def skip_jax_distributed_system(self) -> bool: ...


_WORLD = World()


def world() -> World:
    """Who this process is; alone until `start` says otherwise."""
    return _WORLD


def start(config: StartSettings, environ: Mapping[str, str] = os.environ) -> World:
    """Join the other processes, if there are any, and take the devices that `hardware` asks for."""
    global _WORLD
    place = None if already_joined() else plan(environ, tpu_is_here())
    if place is not None and config.skip_jax_distributed_system:
        if place.count is not None:
            raise ConfigError(
                f"skip_jax_distributed_system=true, but {place.said_by} calls this process {place.index} of "
                f"{place.count}: set it to false, or start one process"
            )
        place = None
    choose_platform(config.hardware)
    if gpu_is_here():
        os.environ.update(gpu_settings(environ))
    if place is not None:
        join(place, config.jax_distributed_initialization_timeout)
    if already_joined():
        import jax

        _WORLD = World(jax.process_index(), jax.process_count())
        agree_on_start()
    check_platform(config.hardware)
    return _WORLD


def take_memory() -> None:
    """On GPUs, JAX takes all the memory that it may have with the first array, which takes seconds
    of a large card: let it begin, while the host does other things."""
    import jax

    def take() -> None:
        with contextlib.suppress(
            jax.errors.JaxRuntimeError
        ):  # whoever needs memory next meets it, too
            for device in jax.local_devices():
                jax.device_put(0, device)

    if jax.default_backend() == "gpu":
        threading.Thread(target=take).start()


def already_joined() -> bool:
    """Also when the program that calls us did it."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def join(place: Rendezvous, timeout: int) -> None:
    import jax

    if place.index == 0 and place.coordinator:
        check_port(place.coordinator)
    where = place.coordinator or "the coordinator that JAX found"
    who = "" if place.index is None else f"process {place.index} of {place.count}: "
    late = threading.Timer(timeout, give_up, [who, where, timeout, place.index == 0])
    late.daemon = True
    late.start()
    # It would catch SIGTERM, for programs that ask it at every step; ours ends well by the loop's
    # own handler.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.count,
            process_id=place.index,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate" if place.coordinator else None,
            initialization_timeout=timeout + 60,  # when it ends, JAX aborts: let `late` speak first
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{who}cannot join the other processes at {where}: {error}") from error
    finally:
        late.cancel()


def give_up(who: str, where: str, timeout: int, first: bool) -> None:
    reason = (
        "not all the others came: see their logs"
        if first
        else "no answer or not all came: check that process 0 runs there, and that its port can be reached from here"
    )
    print(
        f"maxtext: error: {who}could not join the other processes at {where} in {timeout} s, {reason}; "
        "jax_distributed_initialization_timeout sets the time",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def check_port(address: str) -> None:
    """Process 0 must be able to listen; JAX crashes where it is not."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {address}: {error}; choose another port"
            ) from error


def agree_on_start() -> None:
    """All processes take process 0's clock for the name of the run."""
    if STARTED in os.environ or _WORLD.count == 1:
        return
    import numpy as np
    from jax.experimental import multihost_utils

    mine = np.array([int(part) for part in now().split("-")], np.int32)
    day, clock = multihost_utils.broadcast_one_to_all(mine).tolist()
    os.environ[STARTED] = f"{day:08d}-{clock:06d}"


def now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def choose_platform(hardware: str) -> None:
    """hardware=cpu leaves accelerators alone. The default, tpu, takes the best that JAX finds."""
    if hardware == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")


def check_platform(hardware: str) -> None:
    if hardware == "tpu":
        return
    import jax

    found = jax.default_backend()
    if hardware == "cpu" and found != "cpu":
        raise ConfigError(
            f"hardware=cpu, but JAX runs on {found} already: set JAX_PLATFORMS=cpu before it starts"
        )
    if hardware.startswith("gpu") and found not in GPU_PLATFORMS:
        raise ConfigError(
            f"hardware={hardware}, but JAX finds no GPU, only {found}: `maxtext doctor` says why"
        )
    if hardware == "gpu_multiprocess" and _WORLD.count == 1:
        raise ConfigError(
            "hardware=gpu_multiprocess, but this process is alone: start several with `maxtext launch --local N`, srun "
            "or mpirun, or set hardware=gpu"
        )


def leave(code: int, last_words: Callable[[], None] | None = None) -> int:
    """The exit code of a failed process. In company it speaks its last words and leaves at once:
    JAX's own exit waits for the others, who wait for us."""
    if _WORLD.count > 1:
        if last_words is not None:
            last_words()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
