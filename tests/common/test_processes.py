"""Who a process is among others, from the environments that schedulers make; and what start-up
refuses.
"""

import os
from types import SimpleNamespace

import pytest

from maxtext.common import processes, rendezvous
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.rendezvous import Rendezvous, host_names, plan, port_of

OLD, FLAG = "XLA_PYTHON_CLIENT_MEM_FRACTION", "--xla_gpu_enable_triton_gemm=false"
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[007-008],gpu12", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
PODS = {
    "JOB_COMPLETION_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JOB_INDEX": "3",
    "JOBS_IN_JOBSET": "4",
}
HERE = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}


def explicit(**others):
    return HERE | {"JAX_PROCESS_COUNT": "4", "JAX_PROCESS_INDEX": "2"} | others


@pytest.mark.parametrize(
    ("environ", "coordinator", "count", "index"),
    [
        (explicit(), "10.0.0.1:99", 4, 2),
        (
            {"JAX_COORDINATOR_IP": "10.0.0.2", "NNODES": "3", "NODE_RANK": "0"},
            "10.0.0.2:1234",
            3,
            0,
        ),
        (explicit(JAX_COORDINATOR_ADDRESS="head", JAX_COORDINATOR_PORT="7"), "head:7", 4, 2),
        (explicit(JAX_COORDINATOR_ADDRESS="fe80::1"), "[fe80::1]:1234", 4, 2),
        (explicit(JAX_COORDINATOR_ADDRESS="[fe80::1]:5"), "[fe80::1]:5", 4, 2),
        (explicit(JAX_NUM_PROCESSES="4", NODE_RANK="2"), "10.0.0.1:99", 4, 2),
        (SLURM, f"gpu007:{port_of('4711')}", 6, 4),
        (SLURM | HERE, "10.0.0.1:99", 6, 4),
        (SLURM | explicit(), "10.0.0.1:99", 4, 2),
        (OPEN_MPI, f"10.96.0.1:{port_of(OPEN_MPI['OMPI_MCA_orte_hnp_uri'])}", 4, 3),
        (OPEN_MPI | SLURM, f"10.96.0.1:{port_of(OPEN_MPI['OMPI_MCA_orte_hnp_uri'])}", 4, 3),
        (PODS | HERE, "10.0.0.1:99", 8, 7),
        (
            PODS | {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "pods"},
            "run-pods-0-0.run:1234",
            8,
            7,
        ),
        (HERE | {"JOB_COMPLETION_INDEX": "2", "JAX_PROCESS_COUNT": "3"}, "10.0.0.1:99", 3, 2),
    ],
)
def test_a_process_finds_its_place(environ, coordinator, count, index):
    place = plan(environ)
    assert (place.coordinator, place.count, place.index) == (coordinator, count, index)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        HERE | {"JAX_PROCESS_COUNT": "1", "JAX_PROCESS_INDEX": "0"},
        {"NNODES": "1", "NODE_RANK": "0"},
        # a batch script and a shell in an allocation know of the job's tasks, and are none of them
        {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_JOB_NODELIST": "n[1-4]",
        },
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_a_process_that_is_alone_joins_nobody(environ):
    assert plan(environ) is None


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_on_tpus_jax_finds_the_others(environ, found):
    place = plan(environ, tpu_here=True)
    assert (place is not None) == found
    assert place is None or (place.coordinator, place.count, place.index) == (None, None, None)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (explicit(JAX_PROCESS_INDEX="4"), "calls this process 4 of 4: they count from 0 to 3"),
        (explicit(JAX_PROCESS_COUNT="many"), "JAX_PROCESS_COUNT='many' is not a number"),
        (explicit(NNODES="5"), "JAX_PROCESS_COUNT=4 and NNODES=5 contradict"),
        (HERE, "set JAX_PROCESS_COUNT and JAX_PROCESS_INDEX"),
        (HERE | {"NNODES": "2"}, "set JAX_PROCESS_COUNT and JAX_PROCESS_INDEX"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "set JAX_COORDINATOR_ADDRESS=host:port"),
        (PODS, "the name of the first is not known"),
        (
            {k: v for k, v in OPEN_MPI.items() if "uri" not in k},
            "mpirun -x JAX_COORDINATOR_ADDRESS",
        ),
        (
            OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "3 GPUs do not divide over the 2 processes of this node",
        ),
    ],
)
def test_half_a_description_is_refused(environ, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(environ)


@pytest.mark.parametrize(
    ("visible", "ids"), [(None, (1,)), ("0,1,2,3", (2, 3)), ("4,5", (1,)), ("3", None)]
)  # the second of two processes on a node
def test_gpus_of_a_node_are_dealt_out(visible, ids):
    environ = OPEN_MPI | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert plan(environ).local_device_ids == ids


def test_one_process_a_node_keeps_all_gpus():
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x6)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert plan(SLURM | alone).local_device_ids is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("a,b-c", ["a", "b-c"]),
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("x[9-11],y", ["x9", "x10", "x11", "y"]),
        ("r[1-2]n[01-02].lan", ["r1n01.lan", "r1n02.lan", "r2n01.lan", "r2n02.lan"]),
    ],
)
def test_node_lists(text, hosts):
    assert list(host_names(text)) == hosts


def test_two_jobs_meet_at_two_ports():
    assert all(61440 <= port_of(str(job)) < 65536 for job in range(100))
    assert port_of("4711") != port_of("4712")


def keys(**others):
    usual = {
        "hardware": "tpu",
        "skip_jax_distributed_system": False,
        "jax_distributed_initialization_timeout": 3,
    }
    return SimpleNamespace(**usual | others)


def test_start_of_a_process_that_is_alone_starts_nothing():
    assert processes.start(keys(), {}) == processes.World(0, 1)
    assert processes.start(keys(skip_jax_distributed_system=True), {}).count == 1


def test_hardware_cpu_leaves_accelerators_alone(monkeypatch):
    chosen = {}
    monkeypatch.setattr("jax.config.update", chosen.__setitem__)
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    processes.start(keys(hardware="cpu"), {})
    assert chosen == {"jax_platforms": "cpu"}
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="hardware=cpu, but JAX runs on gpu already"):
        processes.start(keys(hardware="cpu"), {})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, processes.GPU_DEFAULTS),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, processes.GPU_DEFAULTS | {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        # JAX ends where both names are set.
        ({OLD: "0.5"}, {OLD: "0.5", "XLA_FLAGS": FLAG}),
        ({"XLA_FLAGS": "--xla_other=1"}, processes.GPU_DEFAULTS | {"XLA_FLAGS": f"--xla_other=1 {FLAG}"}),
        ({"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
         processes.GPU_DEFAULTS | {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}),
        ({"XLA_FLAGS": "/etc/flags"}, processes.GPU_DEFAULTS | {"XLA_FLAGS": "/etc/flags"}),
    ],
)  # fmt: skip
def test_what_gpus_are_told_unless_the_environment_says_otherwise(environ, told):
    assert processes.gpu_settings(environ) == told


@pytest.mark.parametrize("here", [True, False])
def test_gpus_are_told_where_there_are_any(monkeypatch, here):
    for name in processes.GPU_DEFAULTS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(processes, "gpu_is_here", lambda: here)
    processes.start(keys(), {})
    assert (os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.95") == here


def test_skipping_start_up_in_company_is_refused():
    with pytest.raises(
        ConfigError,
        match="skip_jax_distributed_system=true, but JAX_COORDINATOR_ADDRESS calls this",
    ):
        processes.start(keys(skip_jax_distributed_system=True), explicit())


@pytest.mark.parametrize("hardware", ["gpu", "gpu_multiprocess"])
def test_hardware_that_is_not_here_is_refused(hardware, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    with pytest.raises(ConfigError, match=f"hardware={hardware}, but JAX finds no GPU, only cpu"):
        processes.start(keys(hardware=hardware), {})


def test_gpu_multiprocess_is_not_for_one_process(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert processes.start(keys(hardware="gpu"), {}).count == 1
    with pytest.raises(ConfigError, match="hardware=gpu_multiprocess, but this process is alone"):
        processes.start(keys(hardware="gpu_multiprocess"), {})


def test_a_port_that_is_taken_is_a_sentence():
    import socket

    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"process 0 cannot listen at here:{port}.*choose another port"
        ):
            processes.join(Rendezvous("test", f"here:{port}", 2, 0), 3)


def test_the_first_way_that_speaks_decides():
    assert plan(explicit() | SLURM | OPEN_MPI | PODS).said_by == rendezvous.ADDRESS_NAMES[0]
