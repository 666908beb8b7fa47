"""Index and coordinator from the environments of schedulers, and errors at start-up."""

import os
from types import SimpleNamespace

import pytest

from maxtext.common import processes
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.rendezvous import ADDRESS_NAMES, Rendezvous, detect, first_host, port_of_job

OLD, FLAG = "XLA_PYTHON_CLIENT_MEM_FRACTION", "--xla_gpu_enable_triton_gemm=false"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[007-008],gpu12",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
PODS = {
    "JOB_COMPLETION_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JOB_INDEX": "3",
    "JOBS_IN_JOBSET": "4",
}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}


def explicit(**overrides):
    return ADDRESS | {"JAX_PROCESS_COUNT": "4", "JAX_PROCESS_INDEX": "2"} | overrides


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
        (SLURM, f"gpu007:{port_of_job('4711')}", 6, 4),
        (SLURM | ADDRESS, "10.0.0.1:99", 6, 4),
        (SLURM | explicit(), "10.0.0.1:99", 4, 2),
        (OPEN_MPI, f"10.96.0.1:{port_of_job(OPEN_MPI['OMPI_MCA_orte_hnp_uri'])}", 4, 3),
        (OPEN_MPI | SLURM, f"10.96.0.1:{port_of_job(OPEN_MPI['OMPI_MCA_orte_hnp_uri'])}", 4, 3),
        (PODS | ADDRESS, "10.0.0.1:99", 8, 7),
        (
            PODS | {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "pods"},
            "run-pods-0-0.run:1234",
            8,
            7,
        ),
        (ADDRESS | {"JOB_COMPLETION_INDEX": "2", "JAX_PROCESS_COUNT": "3"}, "10.0.0.1:99", 3, 2),
    ],
)
def test_detects_index_and_coordinator(environ, coordinator, count, index):
    found = detect(environ)
    assert (found.coordinator, found.count, found.index) == (coordinator, count, index)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        ADDRESS | {"JAX_PROCESS_COUNT": "1", "JAX_PROCESS_INDEX": "0"},
        {"NNODES": "1", "NODE_RANK": "0"},
        # a batch script, or a shell in an allocation, is none of the job's tasks
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
def test_single_process_needs_no_rendezvous(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "is_pod"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_jax_detects_tpu_pods(environ, is_pod):
    found = detect(environ, tpu=True)
    assert (found is not None) == is_pod
    assert found is None or (found.coordinator, found.count, found.index) == (None, None, None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (explicit(JAX_PROCESS_INDEX="4"), "calls this process 4 of 4: they count from 0 to 3"),
        (explicit(JAX_PROCESS_COUNT="many"), "JAX_PROCESS_COUNT='many' is not a number"),
        (explicit(NNODES="5"), "JAX_PROCESS_COUNT=4 and NNODES=5 contradict"),
        (ADDRESS, "set JAX_PROCESS_COUNT and JAX_PROCESS_INDEX"),
        (ADDRESS | {"NNODES": "2"}, "set JAX_PROCESS_COUNT and JAX_PROCESS_INDEX"),
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
def test_rejects_incomplete_descriptions(environ, message):
    with pytest.raises(ConfigError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("visible", "ids"), [(None, (1,)), ("0,1,2,3", (2, 3)), ("4,5", (1,)), ("3", None)]
)  # the second of two processes on a node
def test_processes_of_a_node_split_its_gpus(visible, ids):
    environ = OPEN_MPI | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert detect(environ).local_device_ids == ids


def test_one_process_per_node_has_all_gpus():
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x6)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert detect(SLURM | alone).local_device_ids is None


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node7", "node7"),
        ("a,b-c", "a"),
        ("node[001-003,7]", "node001"),
        ("x[9-11],y", "x9"),
        ("login,gpu[001-003]", "login"),
        ("r[1-2]n[01-02].lan", "r1n01.lan"),
    ],
)
def test_finds_the_first_host_of_slurm_node_lists(text, host):
    assert first_host(text) == host


def test_jobs_have_different_ports():
    assert all(61440 <= port_of_job(str(job)) < 65536 for job in range(100))
    assert port_of_job("4711") != port_of_job("4712")


def keys(**overrides):
    defaults = {
        "hardware": "tpu",
        "gpu_memory_utilization": 0.95,
        "skip_jax_distributed_system": False,
        "jax_distributed_initialization_timeout": 3,
    }
    return SimpleNamespace(**defaults | overrides)


def test_single_process_does_not_initialize_jax_distributed():
    assert processes.start(keys(), {}) == processes.World(0, 1)
    assert processes.start(keys(skip_jax_distributed_system=True), {}).count == 1


def test_hardware_cpu_ignores_accelerators(monkeypatch):
    chosen = {}
    monkeypatch.setattr("jax.config.update", chosen.__setitem__)
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    processes.start(keys(hardware="cpu"), {})
    assert chosen == {"jax_platforms": "cpu"}
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="hardware=cpu, but JAX runs on gpu already"):
        processes.start(keys(hardware="cpu"), {})


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, processes.GPU_DEFAULTS),
        (
            {"XLA_CLIENT_MEM_FRACTION": "0.5"},
            processes.GPU_DEFAULTS | {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        ),
        # JAX refuses both names together.
        ({OLD: "0.5"}, {OLD: "0.5", "XLA_FLAGS": FLAG}),
        (
            {"XLA_FLAGS": "--xla_other=1"},
            processes.GPU_DEFAULTS | {"XLA_FLAGS": f"--xla_other=1 {FLAG}"},
        ),
        (
            {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
            processes.GPU_DEFAULTS | {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
        ),
        ({"XLA_FLAGS": "/etc/flags"}, processes.GPU_DEFAULTS | {"XLA_FLAGS": "/etc/flags"}),
    ],
)
def test_environment_overrides_gpu_settings(environ, settings):
    assert processes.gpu_settings(environ) == settings


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.4"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({OLD: "0.5"}, {OLD: "0.5"}),
    ],
)
def test_gpu_memory_utilization_is_the_part_that_jax_takes(environ, expected):
    assert processes.memory_setting(environ, 0.4) == expected
    assert processes.gpu_settings(environ, 0.4) == expected | {"XLA_FLAGS": FLAG}


@pytest.mark.parametrize("has_gpu", [True, False])
def test_sets_gpu_settings_only_with_a_gpu(monkeypatch, has_gpu):
    for name in processes.GPU_DEFAULTS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(processes, "has_gpu", lambda: has_gpu)
    processes.start(keys(), {})
    assert (os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.95") == has_gpu


def test_rejects_skip_jax_distributed_system_in_a_group():
    with pytest.raises(
        ConfigError,
        match="skip_jax_distributed_system=true, but JAX_COORDINATOR_ADDRESS calls this",
    ):
        processes.start(keys(skip_jax_distributed_system=True), explicit())


@pytest.mark.parametrize("hardware", ["gpu", "gpu_multiprocess"])
def test_rejects_missing_hardware(hardware, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    with pytest.raises(ConfigError, match=f"hardware={hardware}, but JAX finds no GPU, only cpu"):
        processes.start(keys(hardware=hardware), {})


def test_rejects_gpu_multiprocess_with_one_process(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert processes.start(keys(hardware="gpu"), {}).count == 1
    with pytest.raises(
        ConfigError, match="hardware=gpu_multiprocess, but this is the only process"
    ):
        processes.start(keys(hardware="gpu_multiprocess"), {})


def test_reports_a_port_in_use():
    import socket

    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rendezvous = Rendezvous("test", coordinator=f"here:{port}", count=2, index=0)
        with pytest.raises(
            UserError, match=f"process 0 cannot listen at here:{port}.*choose another port"
        ):
            processes.initialize_distributed(rendezvous, 3)


def test_explicit_variables_take_precedence():
    assert detect(explicit() | SLURM | OPEN_MPI | PODS).source == ADDRESS_NAMES[0]
