"""The output of `maxtext launch --print`: a JobSet for Kubernetes or a batch script for SLURM, with
one process per node.

Both give the run a fixed name, so that a restarted job resumes from its last checkpoint. Both send
SIGTERM early enough for a last save (enable_autocheckpoint). Neither restarts a run whose
configuration is invalid (exit code 2).
"""

import math
import re
import shlex
from collections.abc import Callable

import yaml

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments, parse
from maxtext.cli.commands import COMMANDS
from maxtext.common.errors import ConfigError
from maxtext.common.rendezvous import DEFAULT_PORT
from maxtext.common.types import Json
from maxtext.configs import sources
from maxtext.configs.load import peek_setting

# our name of a TPU -> GKE's name of its node pools, all with four chips per host
TPU_NODES = {
    "v4": "tpu-v4-podslice",
    "v5p": "tpu-v5p-slice",
    "v5e": "tpu-v5-lite-podslice",
    "v6e": "tpu-v6e-slice",
}
CHIPS_PER_HOST = 4
JOB = "workers"
OUTPUT = "/output"


def render(options: Arguments, args: list[str]) -> str:
    name = options["--name"] or "maxtext"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name {name!r}: use up to 40 small letters, digits and dashes, beginning with a "
            "letter"
        )
    for option in UNUSED[options["--print"]]:
        if option in options.values:
            raise ConfigError(
                f"{option} would do nothing: it does not belong to {options['--print']}"
            )
    return RENDERERS[options["--print"]](options, name, args)


def add_defaults(args: list[str], **defaults: str) -> list[str]:
    """The arguments of `train`, with defaults for the keys that neither they nor FILE set."""
    parsed = parse("train", COMMANDS["train"], args)
    positional_args, overrides = positionals.split_overrides(parsed.all_args)
    # Models and data may be on the cluster alone.
    path = next((arg for arg in positional_args[:1] if positionals.names_file(arg, {})), None)
    layer = sources.from_overrides(overrides)
    unset = [key for key in defaults if peek_setting(key, path, layer, {}) is None]
    return [*args, *(f"{key}={defaults[key]}" for key in unset)]


def header(options: Arguments, args: list[str]) -> str:
    given = [f"{name} {shlex.quote(str(value))}" for name, value in options.values.items()]
    return f"# maxtext launch {' '.join(given)} -- train {shlex.join(args)}\n"


def jobset(options: Arguments, name: str, args: list[str]) -> str:
    """A JobSet: one Job per slice, one pod per host; pods find each other by name through the
    headless service."""
    hosts, limits, selector = hardware(options)
    slices = options["--slices"] or 1
    environment = [{"name": "JOBSET_NAME", "value": name}]  # names the run
    if not options["--tpu-topology"]:  # GKE tells TPU pods about each other
        address = f"{name}-{JOB}-0-0.{name}:{DEFAULT_PORT}"
        environment += [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": address},
            {"name": "JAX_PROCESS_COUNT", "value": str(hosts)},
        ]
    container: Json = {
        "name": "train",
        "image": options["--image"] or "maxtext:latest",
        "command": ["maxtext", "train"],
        "args": add_defaults(args, base_output_directory=OUTPUT, enable_autocheckpoint="true"),
        "env": environment,
        "volumeMounts": [
            {"name": "output", "mountPath": OUTPUT},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if limits:
        container["resources"] = {"limits": limits}
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options["--grace"] or 120,
        "containers": [container],
        "volumes": [
            {
                "name": "output",
                "persistentVolumeClaim": {"claimName": options["--volume"] or "maxtext-output"},
            },
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if selector:
        pod["nodeSelector"] = selector
    wrong_configuration = {"containerName": "train", "operator": "In", "values": [2]}
    job = {
        "completionMode": "Indexed",
        "parallelism": hosts,
        "completions": hosts,
        "backoffLimit": 0,  # a pod alone cannot rejoin the others: the JobSet restarts them all
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_configuration}]},
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }
    metadata: Json = {"name": name, "labels": {"app": name}}
    if options["--tpu-topology"]:
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    no_restart = {
        "name": "wrongconfiguration",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": restarts(options), "rules": [no_restart]},
            "replicatedJobs": [{"name": JOB, "replicas": slices, "template": {"spec": job}}],
        },
    }
    return header(options, args) + yaml.safe_dump(manifest, sort_keys=False, width=120)


def hardware(options: Arguments) -> tuple[int, dict[str, int], dict[str, str]]:
    """(hosts of a job, resource limits of a pod, node selector)."""
    topology = options["--tpu-topology"]
    if not topology:
        if options["--slices"]:
            raise ConfigError("--slices would do nothing: it needs --tpu-topology")
        gpus = options["--gpus-per-node"]
        return options["--nodes"] or 1, {"nvidia.com/gpu": gpus} if gpus else {}, {}
    kind, _, shape = topology.partition(":")
    if kind not in TPU_NODES or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ConfigError(
            f"--tpu-topology {topology!r}: write {', '.join(TPU_NODES)} and its shape, as v5p:4x4x4"
        )
    if options["--gpus-per-node"]:
        raise ConfigError("--gpus-per-node and --tpu-topology exclude each other: keep one")
    chips = math.prod(map(int, shape.split("x")))
    hosts = max(chips // CHIPS_PER_HOST, 1)
    if options["--nodes"] not in (None, hosts):
        raise ConfigError(
            f"--nodes {options['--nodes']}, but {topology} has {hosts} hosts: leave --nodes out"
        )
    selector = {
        "cloud.google.com/gke-tpu-accelerator": TPU_NODES[kind],
        "cloud.google.com/gke-tpu-topology": shape,
    }
    return hosts, {"google.com/tpu": min(chips, CHIPS_PER_HOST)}, selector


def restarts(options: Arguments) -> int:
    return 10 if options["--restarts"] is None else options["--restarts"]


SBATCH = """\
#!/bin/bash
{header}#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --signal=B:USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# A requeued job keeps its number, so the run keeps its name and resumes from its last checkpoint.
run_name="{name}-$SLURM_JOB_ID"
restarts={restarts}

export JAX_COORDINATOR_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"

# {grace} s before the time is up: every process stops after its step and saves, and the job
# queues again.
time_is_up=0
stop_and_save() {{
  time_is_up=1
  scancel --signal=TERM "$SLURM_JOB_ID"
}}
trap stop_and_save USR1

srun --kill-on-bad-exit=1 maxtext train {args} &
step=$!
wait "$step"
code=$?
while [ "$time_is_up" = 1 ] && kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

# Code 2 is a wrong configuration: starting again would not mend it.
if [ "$code" != 2 ]; then
  if [ "$time_is_up" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  elif [ "$code" != 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt "$restarts" ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
"""


def sbatch(options: Arguments, name: str, args: list[str]) -> str:
    train_args = add_defaults(args, run_name="", enable_autocheckpoint="true")
    arg_text = " ".join(
        'run_name="$run_name"' if arg == "run_name=" else shlex.quote(arg) for arg in train_args
    )
    gpus = options["--gpus-per-node"]
    return SBATCH.format(
        header=header(options, args),
        name=name,
        nodes=options["--nodes"] or 1,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        time=options["--time"] or "24:00:00",
        grace=options["--grace"] or 120,
        restarts=restarts(options),
        port=DEFAULT_PORT,
        args=arg_text,
    )


RENDERERS: dict[str, Callable[[Arguments, str, list[str]], str]] = {
    "k8s": jobset,
    "slurm": sbatch,
}
UNUSED = {"k8s": ("--time",), "slurm": ("--tpu-topology", "--slices", "--image", "--volume")}
