"""`maxtext launch`: a run of several processes, here and now (--local N) or as a file for a cluster
(--print).

Here: N processes over loopback that live and die together (common/supervise.py). `--restarts K`
starts all of them again after a failure, up to K times; they resume from the run's last checkpoint.
With elastic_enabled a process that failed when no restart is left is lost, and the run goes on with
as many of the rest as its mesh and batch allow.
"""

import argparse
import glob
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from maxtext.cli import arguments, manifests
from maxtext.cli.train import checkpoint_model
from maxtext.common import log, processes, rendezvous, supervise
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.supervise import Command, Supervisor
from maxtext.configs import sources
from maxtext.configs.derive import Devices
from maxtext.configs.types import MaxTextConfig
from maxtext.models.configuration import load

BAD_CONFIGURATION = 2
# How JAX's C++ code ends a process whose coordinator is gone: a log line, its details and a stack
# trace. The launcher says in a sentence which process ended first.
COORDINATOR_NOISE = re.compile(
    r"[EF]\d{4} [\d:.]+ +\d+ (coordination_service_agent\.cc|client\.h):"
    r"|\s+@ +0x[0-9a-f]+ |\*\*\* Check failure stack trace"
    r"|Additional GRPC error information|:UNKNOWN:Error received from peer"
)
COUNT_FLAG = "--xla_force_host_platform_device_count"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see maxtext launch --help")


def at_least(low: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return number


def run(args: list[str]) -> int:
    options, command = parse(args)
    if options.print:
        print(manifests.make(options, command), end="")
        return 0
    log.configure()
    return Local(options, command).run()


def parse(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options, the words after `train`)."""
    parser = Parser(prog="maxtext launch", add_help=False, allow_abbrev=False)
    for option, low in (
        ("--local", 1),
        ("--devices-per-process", 1),
        ("--restarts", 0),
        ("--grace", 1),
    ):
        parser.add_argument(option, type=at_least(low))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--print", choices=tuple(manifests.KINDS))
    manifests.add_options(parser, at_least)
    split = args.index("--") if "--" in args else len(args)
    options = parser.parse_args(args[:split])
    verb, *rest = args[split + 1 :] or [""]
    if verb != "train":
        raise ConfigError(
            "what shall run stands after `--`, and it is train: maxtext launch --local 2 -- train quickstart"
        )
    if bool(options.local) == bool(options.print):
        raise ConfigError(
            "launch takes one of --local N (processes of this machine) and --print k8s|slurm"
        )
    here, there = ("devices_per_process", "cpu"), manifests.OPTIONS
    for name in there if options.local else here:
        if getattr(options, name):
            place = "--print" if options.local else "--local"
            raise ConfigError(f"--{name.replace('_', '-')} would do nothing: it needs {place}")
    return options, rest


class Local:
    """N processes of this machine."""

    def __init__(self, options: argparse.Namespace, args: list[str]):
        self.full = options.local
        self.args = args
        self.path, self.settings = arguments.split(args)
        self.restarts = options.restarts or 0
        self.grace = float(options.grace or 60)
        self.shared = shared_environment(os.environ, options.cpu)
        self.gpus = visible_gpus(self.shared)
        self.devices = devices_each(options, self.shared, self.gpus)
        self.fakes = options.devices_per_process if not self.gpus else None
        self.config = self.configuration(self.full)
        self.check()

    def configuration(self, count: int) -> Any:
        """What `count` processes would train with; a ConfigError where they cannot."""
        devices = Devices(count * self.devices, full=self.full * self.devices)
        model = checkpoint_model(self.path, sources.from_overrides(self.settings))
        config: MaxTextConfig = load(self.path, self.settings, self.shared, devices, model)
        if config.global_batch_size_to_load % count:
            raise ConfigError(
                f"a batch of {config.global_batch_size_to_load} sequences does not divide over {count} processes: "
                "change per_device_batch_size or --local"
            )
        return config

    def check(self) -> None:
        config = self.config
        if self.restarts and not config.enable_checkpointing:
            raise ConfigError(
                "--restarts continues from the last checkpoint: it needs enable_checkpointing=true"
            )
        if config.elastic_enabled and config.elastic_min_slice_count > self.full:
            raise ConfigError(
                f"elastic_min_slice_count={config.elastic_min_slice_count} is more than the {self.full} processes of "
                "--local, each of which stands for a slice"
            )

    def run(self) -> int:
        config, count = self.config, self.full
        restarts, retries = (
            self.restarts,
            config.elastic_max_retries if config.elastic_enabled else 0,
        )
        while True:
            # Until the others have ended, the devices are not free for those that come after.
            patience = (
                config.elastic_timeout_seconds
                if config.elastic_enabled
                else supervise.FAILURE_GRACE_SECONDS
            )
            ended = Supervisor(
                self.commands(count),
                stop_grace=self.grace,
                failure_grace=patience,
                ignored=COORDINATOR_NOISE,
            ).run()
            if ended.code in (0, BAD_CONFIGURATION) or ended.stop_signal is not None:
                return ended.code
            if restarts:
                restarts -= 1
                LOGGER.warning(
                    "starting all %d processes again; restarts left: %d", count, restarts
                )
            elif retries:
                retries -= 1
                fewer = self.after_loss(count - len(ended.failed))
                if fewer is None:
                    return ended.code
                count = fewer
                LOGGER.warning(
                    "going on with %d of %d processes; retries left: %d", count, self.full, retries
                )
            else:
                return ended.code

    def after_loss(self, left: int) -> int | None:
        """The most processes, of those left, whose devices fit the mesh and the global batch; -1 as
        elastic_min_slice_count: all of them, started again."""
        least = self.config.elastic_min_slice_count
        if least == -1:
            return self.full
        why = f"{left} are left"
        for count in range(left, least - 1, -1):
            try:
                self.configuration(count)
                return count
            except ConfigError as error:
                why = str(error).splitlines()[0]
        LOGGER.error(
            "the run cannot go on with %d to %d processes (elastic_min_slice_count): %s",
            least,
            left,
            why,
        )
        return None

    def commands(self, count: int) -> list[Command]:
        address = f"127.0.0.1:{free_port()}"
        line = [sys.executable, "-m", "maxtext", "train", *self.args]
        common = {
            **self.shared,
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_PROCESS_COUNT": str(count),
            processes.FULL_PROCESSES: str(self.full),
        }
        if self.fakes:
            flags = re.sub(rf"{COUNT_FLAG}=\d+", "", common.get("XLA_FLAGS", ""))
            common["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={self.fakes}".strip()
        return [Command(line, {**common, **self.own(index)}) for index in range(count)]

    def own(self, index: int) -> dict[str, str]:
        own = {"JAX_PROCESS_INDEX": str(index)}
        if self.gpus:
            mine = self.gpus[index * self.devices : (index + 1) * self.devices]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return own


def shared_environment(environ: Mapping[str, str], cpu: bool) -> dict[str, str]:
    """Ours, without what speaks of another meeting, and with the time that names the run."""
    other = {
        *rendezvous.ADDRESS_NAMES,
        *rendezvous.COUNT_NAMES,
        *rendezvous.INDEX_NAMES,
        "JAX_LOCAL_DEVICE_IDS",
    }
    shared = {name: value for name, value in environ.items() if name not in other}
    shared.setdefault(processes.STARTED, processes.now())
    return shared | ({"JAX_PLATFORMS": "cpu"} if cpu else {})


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX would take, as CUDA_VISIBLE_DEVICES names them."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if not plugin or environ.get("JAX_PLATFORMS", "") not in ("", "cuda", "gpu", "cuda,cpu"):
        return []
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [arg for arg in environ["CUDA_VISIBLE_DEVICES"].split(",") if arg]
    return [str(place) for place in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def devices_each(options: argparse.Namespace, environ: Mapping[str, str], gpus: list[str]) -> int:
    """How many devices each process has."""
    count, each = options.local, options.devices_per_process
    if gpus:
        if (len(gpus) % count and not each) or count * (each or 1) > len(gpus):
            raise ConfigError(
                f"{len(gpus)} GPUs do not make {count} processes{f' of {each}' if each else ''}: change --local or "
                "--devices-per-process, or add --cpu"
            )
        return each or len(gpus) // count
    if count > 1 and processes.has_tpu() and environ.get("JAX_PLATFORMS") != "cpu":
        raise ConfigError("the TPU chips of a host belong to one process: use --local 1, or --cpu")
    flag = re.search(rf"{COUNT_FLAG}=(\d+)", environ.get("XLA_FLAGS", ""))
    return each or (int(flag[1]) if flag else 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
