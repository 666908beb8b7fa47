"""The index of this process and the coordinator's address, read from the environment, without JAX.

The first source that describes several processes decides:

1. explicit: JAX_COORDINATOR_ADDRESS=host:port (or JAX_COORDINATOR_IP and JAX_COORDINATOR_PORT), the
   number of processes in JAX_PROCESS_COUNT (also JAX_NUM_PROCESSES, NNODES) and the index in
   JAX_PROCESS_INDEX (also JAX_PROCESS_ID, NODE_RANK); an address alone is combined with the count
   and index of 3 to 5;
2. TPU pods: JAX finds the other hosts itself;
3. Open MPI, before SLURM, whose variables mpirun's daemons pass on to all processes;
4. SLURM, but only under `srun`: the batch script and a shell in an allocation also have
   the job's variables;
5. Kubernetes: the index is JOB_COMPLETION_INDEX, which Indexed Jobs and JobSets set; the count must
   also be set;
6. none of these: a single process.

JAX has a detection of its own for 3 to 5, which is not used: under SLURM it takes the tasks of the
job for those of the step, gives every process one GPU, also where it is alone on a node with
several, and misreads lists such as `r[1-2]n[1-2]`; it knows Open MPI up to version 4, and
Kubernetes only where pods may read its API. It reads the environment while it joins, too late for
an error that says what to set.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER

DEFAULT_PORT = 1234
ADDRESS_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
COUNT_NAMES = ("JAX_PROCESS_COUNT", "JAX_NUM_PROCESSES", "NNODES")
INDEX_NAMES = ("JAX_PROCESS_INDEX", "JAX_PROCESS_ID", "NODE_RANK")


@dataclass(frozen=True)
class Rendezvous:
    """Process `index` of `count`, which joins at `coordinator`. Without an address JAX detects all
    of them (TPU pods). `source` is what described them, for error messages.
    """

    source: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def detect(environ: Mapping[str, str], tpu: bool = False) -> Rendezvous | None:
    """How to join, or None for a single process. `tpu`: this machine has TPU chips."""
    address = explicit_address(environ)
    rendezvous = (
        explicit(environ, address)
        or (tpu_pod(environ) if tpu else None)
        or open_mpi(environ, address)
        or slurm(environ, address)
        or kubernetes(environ, address)
    )
    if rendezvous is None:
        refuse_incomplete(environ, address)
        return None
    if rendezvous.count is None or rendezvous.index is None:
        return rendezvous
    if not 0 <= rendezvous.index < rendezvous.count:
        raise ConfigError(
            f"{rendezvous.source} calls this process {rendezvous.index} of {rendezvous.count}: "
            f"they count from 0 to {rendezvous.count - 1}"
        )
    return rendezvous if rendezvous.count > 1 else None


def refuse_incomplete(environ: Mapping[str, str], address: str | None) -> None:
    """Raise ConfigError for a partial description, instead of training in a single process."""
    count, index = read_int(environ, COUNT_NAMES), read_int(environ, INDEX_NAMES)
    if address is not None and (count is None or (count > 1 and index is None)):
        raise ConfigError(
            f"process 0 listens at {address}, but the number of processes or the index of this one "
            f"is missing: set {COUNT_NAMES[0]} and {INDEX_NAMES[0]}"
        )
    if count is not None and count > 1 and index is not None:
        raise ConfigError(
            f"the environment calls this process {index} of {count}, but not where process 0 "
            f"listens: set {ADDRESS_NAMES[0]}=host:port"
        )


def explicit(environ: Mapping[str, str], address: str | None) -> Rendezvous | None:
    count, index = read_int(environ, COUNT_NAMES), read_int(environ, INDEX_NAMES)
    if count is None or index is None or address is None:
        return None
    ids = environ.get("JAX_LOCAL_DEVICE_IDS")
    return Rendezvous(
        ADDRESS_NAMES[0],
        coordinator=address,
        count=count,
        index=index,
        local_device_ids=tuple(map(int, ids.split(","))) if ids else None,
    )


def tpu_pod(environ: Mapping[str, str]) -> Rendezvous | None:
    """Several hosts by GKE's variables, or TPU chips whose hosts the metadata server knows."""
    if "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu"):
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1 or (hosts and "," in hosts):
        return Rendezvous("TPU_WORKER_HOSTNAMES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environ:
        return Rendezvous("the TPU's metadata server")
    return None


def open_mpi(environ: Mapping[str, str], address: str | None) -> Rendezvous | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    count, index = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_RANK"])
    local_count = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    if address is None and count > 1:
        job = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE") or ""
        # Open MPI 4 names the node of mpirun, which has rank 0 by default.
        node = re.search(r"tcp6?://\[?([^,\]]+?)[,\]:]", environ.get("OMPI_MCA_orte_hnp_uri", ""))
        if local_count == count:
            host = "127.0.0.1"
        elif node:
            host = node[1]
        else:
            raise ConfigError(
                f"Open MPI started {count} processes on several hosts and does not name the host "
                f"of the first: mpirun -x {ADDRESS_NAMES[0]}=host:port ..."
            )
        address = f"{bracketed(host)}:{port_of_job(job)}"
    local_rank = int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)
    return Rendezvous(
        "OMPI_COMM_WORLD_RANK",
        coordinator=address,
        count=count,
        index=index,
        local_device_ids=local_device_ids(environ, local_rank, local_count),
    )


def slurm(environ: Mapping[str, str], address: str | None) -> Rendezvous | None:
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return None
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if address is None:
        host = first_host(environ["SLURM_STEP_NODELIST"])
        address = f"{host}:{port_of_job(environ.get('SLURM_JOB_ID', ''))}"
    local_rank = int(environ.get("SLURM_LOCALID") or 0)
    return Rendezvous(
        "SLURM_PROCID",
        coordinator=address,
        count=count,
        index=int(environ["SLURM_PROCID"]),
        local_device_ids=local_device_ids(environ, local_rank, tasks_on_this_node(environ)),
    )


def kubernetes(environ: Mapping[str, str], address: str | None) -> Rendezvous | None:
    """An Indexed Job, or the jobs of a JobSet (JOB_INDEX), each of PROCESSES_IN_JOB pods."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    in_job = int(environ.get("PROCESSES_IN_JOB") or 0)
    count = read_int(environ, COUNT_NAMES) or in_job * int(environ.get("JOBS_IN_JOBSET") or 1)
    if not count:
        LOGGER.warning(
            "JOB_COMPLETION_INDEX is set, but not the number of pods: this pod trains alone; to "
            "join the others set %s and %s",
            COUNT_NAMES[0],
            ADDRESS_NAMES[0],
        )
        return None
    index = int(environ.get("JOB_INDEX") or 0) * in_job + int(environ["JOB_COMPLETION_INDEX"])
    name, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    if address is None and name and job:
        address = f"{name}-{job}-0-0.{name}:{DEFAULT_PORT}"
    if address is None and count > 1:
        raise ConfigError(
            f"this pod is {index} of {count}, but the name of the first is not known: set "
            f"{ADDRESS_NAMES[0]} to its name in the headless service and a port, or JOBSET_NAME "
            "and REPLICATED_JOB_NAME of the JobSet"
        )
    return Rendezvous("JOB_COMPLETION_INDEX", coordinator=address, count=count, index=index)


def explicit_address(environ: Mapping[str, str]) -> str | None:
    """host:port of process 0, if the environment has it."""
    host = next((environ[name] for name in ADDRESS_NAMES if environ.get(name)), None)
    if host is None:
        return None
    if re.search(r"(^[^:]+|\]):\d+$", host):
        return host
    return f"{bracketed(host)}:{environ.get('JAX_COORDINATOR_PORT') or DEFAULT_PORT}"


def bracketed(host: str) -> str:
    """Put an IPv6 address in brackets, as needed before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def read_int(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of a variable with several names. Raises ConfigError if they contradict."""
    values = {name: environ[name] for name in names if environ.get(name)}
    for name, text in values.items():
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r} is not a number")
    if len({int(text) for text in values.values()}) > 1:
        settings = " and ".join(f"{name}={text}" for name, text in values.items())
        raise ConfigError(f"{settings} contradict: keep one")
    return next((int(text) for text in values.values()), None)


def port_of_job(job: str) -> int:
    """A port that is the same in all processes of a job, and rarely the same for two jobs."""
    return 61440 + zlib.crc32(job.encode()) % 4096


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: gpu001 of `gpu[001-003,7],login`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    assert first is not None, "a step has nodes"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """The tasks of the step on this node: SLURM writes `4(x2),3` for nodes with 4, 4 and 3."""
    counts: list[int] = []
    for part in (environ.get("SLURM_STEP_TASKS_PER_NODE") or "1").split(","):
        tasks, _, times = part.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    node = int(environ.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else counts[-1]


def local_device_ids(
    environ: Mapping[str, str], local_rank: int, local_count: int
) -> tuple[int, ...] | None:
    """The GPUs of a process on its node, if the scheduler leaves all of them visible to all."""
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if local_count == 1 or len(visible) == 1:
        return None
    if not visible:
        return (local_rank,)
    if len(visible) % local_count:
        raise ConfigError(
            f"{len(visible)} GPUs do not divide over the {local_count} processes of this node: "
            "start one process per GPU or one per node"
        )
    per_process = len(visible) // local_count
    return tuple(range(local_rank * per_process, (local_rank + 1) * per_process))
