"""Who this process is among those of its run, read from the environment. Knows no JAX and starts
nothing.

In this order, the first that speaks of several processes decides:

1. explicit: JAX_COORDINATOR_ADDRESS=host:port (or JAX_COORDINATOR_IP and JAX_COORDINATOR_PORT), the
   number of processes in JAX_PROCESS_COUNT (also JAX_NUM_PROCESSES, NNODES) and this one in
   JAX_PROCESS_INDEX (also JAX_PROCESS_ID, NODE_RANK); the address alone is joined to what 3 to 5
   know of count and index;
2. TPU pods: JAX finds the other hosts itself;
3. Open MPI, before SLURM, whose variables mpirun's daemons pass on to every process;
4. SLURM, but only under `srun`: the batch script and a shell in an allocation have the job's
   variables, too;
5. Kubernetes: the index in JOB_COMPLETION_INDEX, as Indexed Jobs and JobSets set it; the count must
   be given;
6. nothing of these: one process, nothing to start.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER

DEFAULT_PORT = 1234
ADDRESS_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
COUNT_NAMES = ("JAX_PROCESS_COUNT", "JAX_NUM_PROCESSES", "NNODES")
INDEX_NAMES = ("JAX_PROCESS_INDEX", "JAX_PROCESS_ID", "NODE_RANK")


@dataclass(frozen=True)
class Rendezvous:
    """Process `index` of `count`, joining at `coordinator`. Without an address JAX finds all of it
    (TPU pods).
    """

    said_by: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_device_ids: tuple[int, ...] | None = None


def plan(environ: Mapping[str, str], tpu_here: bool = False) -> Rendezvous | None:
    """How to join, or None for a process that is alone. `tpu_here`: this machine has TPU chips."""
    given = explicit_address(environ)
    place = (
        explicit(environ, given)
        or (tpu_pod(environ) if tpu_here else None)
        or open_mpi(environ, given)
        or slurm(environ, given)
        or kubernetes(environ, given)
    )
    if place is None:
        refuse_half_said(environ, given)
        return None
    if place.count is None or place.index is None:
        return place
    if not 0 <= place.index < place.count:
        raise ConfigError(
            f"{place.said_by} calls this process {place.index} of {place.count}: they count from 0 to {place.count - 1}"
        )
    return place if place.count > 1 else None


def refuse_half_said(environ: Mapping[str, str], given: str | None) -> None:
    """Where only part of a meeting is described, a process that trained alone would be a
    surprise.
    """
    count, index = number(environ, COUNT_NAMES), number(environ, INDEX_NAMES)
    if given is not None and (count is None or (count > 1 and index is None)):
        raise ConfigError(
            f"process 0 listens at {given}, but it is not said how many processes there are and which one this is: "
            f"set {COUNT_NAMES[0]} and {INDEX_NAMES[0]}"
        )
    if count is not None and count > 1 and index is not None:
        raise ConfigError(
            f"the environment calls this process {index} of {count}, but not where process 0 listens: "
            f"set {ADDRESS_NAMES[0]}=host:port"
        )


def explicit(environ: Mapping[str, str], given: str | None) -> Rendezvous | None:
    count, index = number(environ, COUNT_NAMES), number(environ, INDEX_NAMES)
    if count is None or index is None or given is None:
        return None
    ids = environ.get("JAX_LOCAL_DEVICE_IDS")
    return Rendezvous(
        ADDRESS_NAMES[0], given, count, index, tuple(map(int, ids.split(","))) if ids else None
    )


def tpu_pod(environ: Mapping[str, str]) -> Rendezvous | None:
    """Several hosts by the variables of GKE, or TPU chips whose hosts only the machine's metadata
    server knows.
    """
    if "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu"):
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1 or (hosts and "," in hosts):
        return Rendezvous("TPU_WORKER_HOSTNAMES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environ:
        return Rendezvous("the TPU's metadata server")
    return None


def open_mpi(environ: Mapping[str, str], given: str | None) -> Rendezvous | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    count, index = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_RANK"])
    here = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    address = given
    if address is None and count > 1:
        job = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE") or ""
        # Open MPI 4 names the node of mpirun, where it puts rank 0 unless told otherwise.
        node = re.search(r"tcp6?://\[?([^,\]]+?)[,\]:]", environ.get("OMPI_MCA_orte_hnp_uri", ""))
        if here == count:
            host = "127.0.0.1"
        elif node:
            host = node[1]
        else:
            raise ConfigError(
                f"Open MPI started {count} processes on several hosts and does not say where the first one is: "
                f"mpirun -x {ADDRESS_NAMES[0]}=host:port ..."
            )
        address = f"{bracketed(host)}:{port_of(job)}"
    ids = share_of_devices(environ, int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0), here)
    return Rendezvous("OMPI_COMM_WORLD_RANK", address, count, index, ids)


def slurm(environ: Mapping[str, str], given: str | None) -> Rendezvous | None:
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return None
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    address = (
        given
        or f"{next(host_names(environ['SLURM_STEP_NODELIST']))}:{port_of(environ.get('SLURM_JOB_ID', ''))}"
    )
    here = tasks_here(environ)
    ids = share_of_devices(environ, int(environ.get("SLURM_LOCALID") or 0), here)
    return Rendezvous("SLURM_PROCID", address, count, int(environ["SLURM_PROCID"]), ids)


def kubernetes(environ: Mapping[str, str], given: str | None) -> Rendezvous | None:
    """An Indexed Job, or the jobs of a JobSet (JOB_INDEX), each of PROCESSES_IN_JOB pods."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    in_job = int(environ.get("PROCESSES_IN_JOB") or 0)
    count = number(environ, COUNT_NAMES) or in_job * int(environ.get("JOBS_IN_JOBSET") or 1)
    if not count:
        LOGGER.warning(
            "JOB_COMPLETION_INDEX is set, but not how many pods there are: this one trains alone; "
            "to join them set %s and %s",
            COUNT_NAMES[0],
            ADDRESS_NAMES[0],
        )
        return None
    index = int(environ.get("JOB_INDEX") or 0) * in_job + int(environ["JOB_COMPLETION_INDEX"])
    name, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    address = given or (f"{name}-{job}-0-0.{name}:{DEFAULT_PORT}" if name and job else None)
    if address is None and count > 1:
        raise ConfigError(
            f"this pod is {index} of {count}, but the name of the first is not known: set {ADDRESS_NAMES[0]} to "
            "its name in the headless service and a port, or JOBSET_NAME and REPLICATED_JOB_NAME of the JobSet"
        )
    return Rendezvous("JOB_COMPLETION_INDEX", address, count, index)


def explicit_address(environ: Mapping[str, str]) -> str | None:
    """host:port of process 0, if the environment gives it."""
    host = next((environ[name] for name in ADDRESS_NAMES if environ.get(name)), None)
    if host is None:
        return None
    if re.search(r"(^[^:]+|\]):\d+$", host):
        return host
    return f"{bracketed(host)}:{environ.get('JAX_COORDINATOR_PORT') or DEFAULT_PORT}"


def bracketed(host: str) -> str:
    """IPv6 addresses stand in brackets before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The one value that the variables of these names have."""
    found = {name: environ[name] for name in names if environ.get(name)}
    for name, text in found.items():
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r} is not a number")
    if len({int(text) for text in found.values()}) > 1:
        raise ConfigError(
            f"{' and '.join(f'{name}={text}' for name, text in found.items())} contradict: keep one"
        )
    return next((int(text) for text in found.values()), None)


def port_of(job: str) -> int:
    """A port that every process of a job computes alike, and two jobs on a node hardly ever."""
    return 61440 + zlib.crc32(job.encode()) % 4096


def host_names(text: str) -> Iterator[str]:
    """The hosts of a SLURM node list: `login,gpu[001-003,7],rack[1-2]n[1-2]`."""
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        yield from expand(entry)


def expand(entry: str) -> Iterator[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        yield entry
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        low, _, high = part.partition("-")
        for place in range(int(low), int(high or low) + 1):
            for tail in expand(after):
                yield f"{before}{place:0{len(low)}d}{tail}"


def tasks_here(environ: Mapping[str, str]) -> int:
    """How many tasks of the step share this node: SLURM writes `4(x2),3` for nodes with 4, 4 and
    3.
    """
    counts: list[int] = []
    for part in (environ.get("SLURM_STEP_TASKS_PER_NODE") or "1").split(","):
        tasks, _, times = part.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    place = int(environ.get("SLURM_NODEID") or 0)
    return counts[place] if place < len(counts) else counts[-1]


def share_of_devices(environ: Mapping[str, str], place: int, among: int) -> tuple[int, ...] | None:
    """The GPUs of process `place` of `among` on a node, where the scheduler leaves all of them
    visible to each.
    """
    visible = [word for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if among == 1 or len(visible) == 1:
        return None
    if not visible:
        return (place,)
    if len(visible) % among:
        raise ConfigError(
            f"{len(visible)} GPUs do not divide over the {among} processes of this node: "
            "start as many processes a node as there are GPUs, or one"
        )
    each = len(visible) // among
    return tuple(range(place * each, (place + 1) * each))
