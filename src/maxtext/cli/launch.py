"""`maxtext launch`: a run of several processes, on this machine (--local N) or as a file for a
cluster (--print).

--local starts N processes that communicate over loopback and live and die together
(common/supervise.py). `--restarts K` restarts all of them after a failure, up to K times; they
resume from the run's last checkpoint. With elastic_enabled, a process that fails when no restart is
left is lost, and the run continues with as many of the others as its mesh and batch allow.
"""

import glob
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping

from maxtext.cli import manifests, positionals
from maxtext.cli.arguments import Arguments, parse
from maxtext.cli.commands import COMMANDS
from maxtext.cli.train import open_model_checkpoint
from maxtext.common import log, processes, rendezvous, supervise
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.supervise import Command, Supervisor
from maxtext.configs import sources
from maxtext.configs.derive import Devices
from maxtext.configs.types import MaxTextConfig
from maxtext.models.configuration import load

BAD_CONFIGURATION = 2
# What JAX's C++ code prints when it ends a process whose coordinator is gone: a log line, its
# details and a stack trace. The launcher reports in one sentence which process ended first.
COORDINATOR_NOISE = re.compile(
    r"[EF]\d{4} [\d:.]+ +\d+ (coordination_service_agent\.cc|client\.h):"
    r"|\s+@ +0x[0-9a-f]+ |\*\*\* Check failure stack trace"
    r"|Additional GRPC error information|:UNKNOWN:Error received from peer"
)
COUNT_FLAG = "--xla_force_host_platform_device_count"


def run(arguments: Arguments) -> int:
    train_args = check_arguments(arguments)
    if arguments["--print"]:
        print(manifests.render(arguments, train_args), end="")
        return 0
    log.configure()
    return LocalLauncher(arguments, train_args).run()


def check_arguments(arguments: Arguments) -> list[str]:
    """The arguments after `train`. Raises ConfigError if another command is named, or none."""
    command, *train_args = arguments.rest or [""]
    if arguments.args or command != "train":
        raise ConfigError(
            "the command to run follows `--`, and it must be train: "
            "maxtext launch --local 2 -- train quickstart"
        )
    if bool(arguments["--local"]) == bool(arguments["--print"]):
        raise ConfigError(
            "launch takes one of --local N (processes of this machine) and --print k8s|slurm"
        )
    return train_args


class LocalLauncher:
    """Runs N processes on this machine."""

    def __init__(self, options: Arguments, args: list[str]):
        self.num_processes = options["--local"]
        self.args = args
        parsed = parse("train", COMMANDS["train"], args)
        self.path, self.overrides = positionals.split(parsed.all_args)
        self.restarts = options["--restarts"] or 0
        self.grace = float(options["--grace"] or 60)
        self.environment = shared_environment(os.environ, options["--cpu"])
        self.gpus = visible_gpus(self.environment)
        self.devices_per_process = devices_per_process(options, self.environment, self.gpus)
        self.simulated_devices = options["--devices-per-process"] if not self.gpus else None
        self.config = self.load_config(self.num_processes)
        self.check()

    def load_config(self, count: int) -> MaxTextConfig:
        """The configuration of a run of `count` processes. Raises ConfigError if there is none."""
        devices = Devices(
            count * self.devices_per_process, full=self.num_processes * self.devices_per_process
        )
        layer = sources.from_overrides(self.overrides)
        checkpoint = open_model_checkpoint(self.path, layer)
        model = checkpoint.settings if checkpoint else None
        config = load(self.path, layer, self.environment, devices, model)
        if config.global_batch_size_to_load % count:
            raise ConfigError(
                f"a batch of {config.global_batch_size_to_load} sequences does not divide over "
                f"{count} processes: change per_device_batch_size or --local"
            )
        return config

    def check(self) -> None:
        config = self.config
        if self.restarts and not config.enable_checkpointing:
            raise ConfigError(
                "--restarts continues from the last checkpoint: it needs enable_checkpointing=true"
            )
        if config.elastic_enabled and config.elastic_min_slice_count > self.num_processes:
            raise ConfigError(
                f"elastic_min_slice_count={config.elastic_min_slice_count} is more than the "
                f"{self.num_processes} processes of --local, each of which stands for a slice"
            )

    def run(self) -> int:
        config, count, restarts = self.config, self.num_processes, self.restarts
        retries = config.elastic_max_retries if config.elastic_enabled else 0
        # The devices are not free for a restart until all other processes have ended.
        timeout = (
            config.elastic_timeout_seconds
            if config.elastic_enabled
            else supervise.FAILURE_GRACE_SECONDS
        )
        while True:
            outcome = Supervisor(
                self.commands(count),
                stop_grace=self.grace,
                failure_grace=timeout,
                ignored=COORDINATOR_NOISE,
            ).run()
            if outcome.code in (0, BAD_CONFIGURATION) or outcome.stop_signal is not None:
                return outcome.code
            if restarts:
                restarts -= 1
                LOGGER.warning(
                    "starting all %d processes again; restarts left: %d", count, restarts
                )
            elif retries:
                retries -= 1
                new_count = self.shrink_to(count - len(outcome.failed))
                if new_count is None:
                    return outcome.code
                count = new_count
                LOGGER.warning(
                    "going on with %d of %d processes; retries left: %d",
                    count,
                    self.num_processes,
                    retries,
                )
            else:
                return outcome.code

    def shrink_to(self, available: int) -> int | None:
        """The most processes, up to `available`, whose devices fit the mesh and the global batch;
        None if too few are left. With elastic_min_slice_count=-1 all processes, restarted."""
        minimum = self.config.elastic_min_slice_count
        if minimum == -1:
            return self.num_processes
        reason = f"{available} are left"
        for count in range(available, minimum - 1, -1):
            try:
                self.load_config(count)
                return count
            except ConfigError as error:
                reason = str(error).splitlines()[0]
        LOGGER.error(
            "the run cannot go on with %d to %d processes (elastic_min_slice_count): %s",
            minimum,
            available,
            reason,
        )
        return None

    def commands(self, count: int) -> list[Command]:
        address = f"127.0.0.1:{free_port()}"
        line = [sys.executable, "-m", "maxtext", "train", *self.args]
        environment = {
            **self.environment,
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_PROCESS_COUNT": str(count),
            processes.FULL_PROCESSES: str(self.num_processes),
        }
        if self.simulated_devices:
            flags = re.sub(rf"{COUNT_FLAG}=\d+", "", environment.get("XLA_FLAGS", ""))
            environment["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={self.simulated_devices}".strip()
        return [
            Command(line, {**environment, **self.process_environment(index)})
            for index in range(count)
        ]

    def process_environment(self, index: int) -> dict[str, str]:
        environment = {"JAX_PROCESS_INDEX": str(index)}
        if self.gpus:
            first = index * self.devices_per_process
            gpus = self.gpus[first : first + self.devices_per_process]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return environment


def shared_environment(environ: Mapping[str, str], cpu: bool) -> dict[str, str]:
    """This environment, without the variables of another rendezvous, and with the start time that
    names the run."""
    excluded = {
        *rendezvous.ADDRESS_NAMES,
        *rendezvous.COUNT_NAMES,
        *rendezvous.INDEX_NAMES,
        "JAX_LOCAL_DEVICE_IDS",
    }
    shared = {name: value for name, value in environ.items() if name not in excluded}
    shared.setdefault(processes.STARTED, processes.now())
    return shared | ({"JAX_PLATFORMS": "cpu"} if cpu else {})


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX would use, as named in CUDA_VISIBLE_DEVICES."""
    has_plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if not has_plugin or environ.get("JAX_PLATFORMS", "") not in ("", "cuda", "gpu", "cuda,cpu"):
        return []
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def devices_per_process(options: Arguments, environ: Mapping[str, str], gpus: list[str]) -> int:
    count, requested = options["--local"], options["--devices-per-process"]
    if gpus:
        if (len(gpus) % count and not requested) or count * (requested or 1) > len(gpus):
            raise ConfigError(
                f"{len(gpus)} GPUs do not make {count} processes"
                f"{f' of {requested}' if requested else ''}: change --local or "
                "--devices-per-process, or add --cpu"
            )
        return requested or len(gpus) // count
    if count > 1 and processes.has_tpu() and environ.get("JAX_PLATFORMS") != "cpu":
        raise ConfigError("the TPU chips of a host belong to one process: use --local 1, or --cpu")
    flag = re.search(rf"{COUNT_FLAG}=(\d+)", environ.get("XLA_FLAGS", ""))
    return requested or (int(flag[1]) if flag else 1)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
