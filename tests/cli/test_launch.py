"""`maxtext launch`: what it refuses, what it gives each process, and the files that it writes for
clusters.
"""

import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from maxtext.cli import launch
from maxtext.cli.arguments import parse
from maxtext.cli.commands import COMMANDS
from maxtext.cli.main import main
from maxtext.common import rendezvous

DEPLOY = Path(__file__).parents[2] / "deploy"
TINY = [
    "base_emb_dim=32",
    "per_device_batch_size=2",
    "max_target_length=16",
    "dataset_type=synthetic",
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *words):
    assert main(["launch", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the command to run follows `--`"),
        (["--local", "2"], "the command to run follows `--`"),
        (["--local", "2", "--", "decode"], "and it must be train"),
        (["--", "train"], "launch takes one of --local N"),
        (["--local", "2", "--print", "k8s", "--", "train"], "launch takes one of --local N"),
        (["--local", "0", "--", "train"], "--local takes a whole number of at least 1, not '0'"),
        (["--local", "two", "--", "train"], "--local takes a whole number"),
        (["--lokal", "2", "--", "train"], "unknown option '--lokal'; did you mean --local?"),
        (["--print", "mesos", "--", "train"], "--print takes k8s or slurm, not 'mesos'"),
        (["--local", "2", "--image", "x", "--", "train"], "--image would do nothing: it needs "
                                                          "--print"),
        (["--print", "slurm", "--cpu", "--", "train"], "--cpu would do nothing: it needs --local"),
        (["--print", "slurm", "--image", "x", "--", "train"], "--image would do nothing: it does "
                                                              "not belong to slurm"),
        (["--print", "k8s", "--time", "1", "--", "train"], "--time would do nothing: it does not "
                                                           "belong to k8s"),
        (["--print", "k8s", "--name", "No_Good", "--", "train"], "use up to 40 small letters"),
        (["--print", "k8s", "--slices", "2", "--", "train"], "--slices would do nothing: it needs "
                                                             "--tpu-topology"),
        (["--print", "k8s", "--tpu-topology", "v9:4x4", "--", "train"], "write v4, v5p, v5e, v6e "
                                                                        "and its shape"),
        (["--print", "k8s", "--tpu-topology", "v5p:2x2x2", "--nodes", "3", "--", "train"],
         "has 2 hosts"),
        (["--local", "2", "--cpu", "--", "train", "stepz=1"], "unknown key 'stepz'"),
        (["--local", "2", "--cpu", "--", "train", "ici_fsdp_parallelism=3"], "does not make 2 "
                                                                             "devices"),
        (["--local", "3", "--cpu", "--", "train", *TINY, "elastic_enabled=true",
          "elastic_min_slice_count=4"],
         "elastic_min_slice_count=4 is more than the 3 processes"),
        (["--local", "2", "--cpu", "--", "train", "elastic_max_retries=4"], "it needs "
                                                                            "elastic_enabled=true"),
    ],
)  # fmt: skip
def test_bad_words_are_sentences(capsys, words, sentence):
    err = refused(capsys, *words)
    assert sentence in err
    assert all(line.startswith("maxtext: error: ") for line in err.splitlines())


def test_elastic_training_without_the_launcher_is_refused(capsys):
    assert main(["train", *TINY, "elastic_enabled=true"]) == 2
    assert (
        "elastic_enabled=true would do nothing: it needs `maxtext launch" in capsys.readouterr().err
    )


def local(*words, options=("--local", "4", "--cpu")):
    args = [*options, "--", "train", *TINY, *words]
    arguments = parse("launch", COMMANDS["launch"], args)
    return launch.LocalLauncher(arguments, launch.check_arguments(arguments))


def test_each_process_is_told_its_place(monkeypatch):
    monkeypatch.setenv("NNODES", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=3")
    job = local("run_name=x", options=("--local", "2", "--cpu", "--devices-per-process", "2"))
    commands = job.commands(2)
    places = [rendezvous.detect(command.environment) for command in commands]
    assert [(place.index, place.count) for place in places] == [(0, 2), (1, 2)]
    assert places[0].coordinator == places[1].coordinator
    assert places[0].coordinator.startswith("127.0.0.1:")
    assert {command.environment["JAX_PLATFORMS"] for command in commands} == {"cpu"}
    flags = commands[0].environment["XLA_FLAGS"].split()
    assert flags == ["--xla_a=1", "--xla_force_host_platform_device_count=2"]
    assert list(commands[0].args)[-5:] == [*TINY, "run_name=x"]
    assert job.config.num_target_devices == 4


def test_the_run_has_one_name_for_all_processes_and_restarts():
    job = local()
    stamps = {
        command.environment["MAXTEXT_STARTED"] for _ in range(2) for command in job.commands(4)
    }
    assert len(stamps) == 1
    assert job.config.run_name == f"default-{stamps.pop()}"


def with_gpus(monkeypatch, visible, *options):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return [c.environment["CUDA_VISIBLE_DEVICES"] for c in local(options=options).commands(2)]


def test_gpus_are_dealt_out_evenly(monkeypatch):
    assert with_gpus(monkeypatch, "0,1,2,3", "--local", "2") == ["0,1", "2,3"]
    assert with_gpus(
        monkeypatch, "GPU-a,GPU-b,GPU-c", "--local", "2", "--devices-per-process", "1"
    ) == [
        "GPU-a",
        "GPU-b",
    ]
    with pytest.raises(Exception, match="3 GPUs do not make 2 processes"):
        with_gpus(monkeypatch, "0,1,2", "--local", "2")


def elastic(*words, count=4):
    return local("elastic_enabled=true", *words, options=("--local", str(count), "--cpu"))


def test_after_a_loss_the_largest_count_that_fits_goes_on_with_the_same_batch():
    job = elastic("elastic_min_slice_count=1")
    assert job.config.global_batch_size_to_train_on == 4 * 2
    assert job.shrink_to(3) == 2  # eight sequences do not divide over three
    smaller = job.load_config(2)
    assert (smaller.num_target_devices, smaller.global_batch_size_to_train_on) == (2, 8)
    assert smaller.global_batch_size_to_load == 8
    assert job.shrink_to(1) == 1
    assert elastic("elastic_min_slice_count=1", count=6).shrink_to(5) == 4  # twelve sequences
    assert elastic("elastic_min_slice_count=3").shrink_to(3) is None
    assert elastic("elastic_min_slice_count=1", "ici_fsdp_parallelism=4").shrink_to(3) is None
    assert elastic().shrink_to(3) == 4  # -1: all of them


def outcomes(monkeypatch, job, *ends):
    """(exit code, the process counts of each start) of a launcher whose groups end so."""
    counts = []
    ends = iter(ends)

    class Group:
        def __init__(self, commands, stop_grace, failure_grace, ignored):
            counts.append(len(commands))
            self.failure_grace = failure_grace

        def run(self):
            return next(ends)

    monkeypatch.setattr(launch, "Supervisor", Group)
    return job.run(), counts


GOOD, BAD, KILLED = (
    launch.supervise.GroupExit(0),
    launch.supervise.GroupExit(2, (0,)),
    launch.supervise.GroupExit(137, (1,)),
)


def test_restarts_are_counted(monkeypatch):
    def job(restarts):
        return local(options=("--local", "2", "--cpu", "--restarts", restarts))

    assert outcomes(monkeypatch, job("0"), KILLED) == (137, [2])
    assert outcomes(monkeypatch, job("2"), KILLED, KILLED, KILLED) == (137, [2, 2, 2])
    assert outcomes(monkeypatch, job("2"), KILLED, GOOD) == (0, [2, 2])
    assert outcomes(monkeypatch, job("2"), BAD) == (2, [2])
    asked = launch.supervise.GroupExit(137, (1,), stop_signal=15)
    assert outcomes(monkeypatch, job("2"), asked) == (137, [2])


def test_a_lost_process_is_replaced_while_restarts_last_and_then_missed(monkeypatch):
    words = ("elastic_enabled=true", "elastic_min_slice_count=1", "elastic_max_retries=2")
    job = local(*words, options=("--local", "4", "--cpu", "--restarts", "1"))
    assert outcomes(monkeypatch, job, KILLED, KILLED, KILLED, GOOD) == (0, [4, 4, 2, 1])
    assert outcomes(monkeypatch, job, KILLED, KILLED, KILLED, KILLED) == (137, [4, 4, 2, 1])


# The files for clusters.

TRAIN = [
    "train", "model_name=llama3.1-8b", "dataset_type=synthetic", "steps=1000",
    "per_device_batch_size=1",
]  # fmt: skip
TEXT = {"type": str}
COUNT = {"type": int, "least": 1}
NAME = {"type": str, "pattern": r"[a-z]([-a-z0-9]*[a-z0-9])?"}
# What the JobSet API (jobset.x-k8s.io/v1alpha2, over batch/v1 and v1) wants of the fields that we
# write.
POD = {
    "restartPolicy": {"enum": ["Never"]},  # the only one that podFailurePolicy allows
    "terminationGracePeriodSeconds": COUNT,
    "containers": [
        {
            "name": NAME, "image": TEXT, "command": [TEXT], "args": [TEXT],
            "env": [{"name": TEXT, "value": TEXT}],
            "volumeMounts": [{"name": NAME, "mountPath": TEXT}],
            "resources?": {"limits": {"nvidia.com/gpu?": COUNT, "google.com/tpu?": COUNT}},
        }
    ],
    "volumes": [
        {"name": NAME, "persistentVolumeClaim?": {"claimName": NAME},
         "emptyDir?": {"medium": {"enum": ["Memory"]}}}
    ],
    "nodeSelector?": {"cloud.google.com/gke-tpu-accelerator": TEXT,
                      "cloud.google.com/gke-tpu-topology": TEXT},
}  # fmt: skip
JOB = {
    "completionMode": {"enum": ["Indexed"]}, "parallelism": COUNT, "completions": COUNT,
    "backoffLimit": {"type": int, "least": 0},
    "podFailurePolicy": {
        "rules": [
            {
                "action": {"enum": ["FailJob", "Ignore", "Count", "FailIndex"]},
                "onExitCodes": {"containerName": NAME, "operator": {"enum": ["In", "NotIn"]},
                                "values": [COUNT]},
            }
        ]
    },
    "template": {"metadata": {"labels": {"app": NAME}}, "spec": POD},
}  # fmt: skip
JOBSET = {
    "apiVersion": {"enum": ["jobset.x-k8s.io/v1alpha2"]},
    "kind": {"enum": ["JobSet"]},
    "metadata": {
        "name": NAME, "labels": {"app": NAME},
        "annotations?": {"alpha.jobset.sigs.k8s.io/exclusive-topology": TEXT},
    },
    "spec": {
        "network": {"enableDNSHostnames": {"enum": [True]}, "subdomain": NAME},
        "failurePolicy": {
            "maxRestarts": {"type": int, "least": 0},
            "rules": [
                {
                    "name": {"type": str, "pattern": r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"},
                    "action": {"enum": ["FailJobSet", "RestartJobSet",
                                        "RestartJobSetAndIgnoreMaxRestarts"]},
                    "onJobFailureReasons": [{"enum": ["PodFailurePolicy", "BackoffLimitExceeded"]}],
                }
            ],
        },
        "replicatedJobs": [{"name": NAME, "replicas": COUNT, "template": {"spec": JOB}}],
    },
}  # fmt: skip


def misfits(value, schema, place="manifest"):
    """What a value has against its schema: {name: schema} with `?` behind what may be missing,
    [schema], or a leaf.
    """
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{place} is not a list"]
        return [
            problem
            for i, item in enumerate(value)
            for problem in misfits(item, schema[0], f"{place}[{i}]")
        ]
    if "enum" in schema and not isinstance(schema["enum"], dict):
        return [] if value in schema["enum"] else [f"{place}={value!r} is none of {schema['enum']}"]
    if isinstance(schema.get("type"), type):
        fits = type(value) is schema["type"]
        fits = fits and ("least" not in schema or value >= schema["least"])
        fits = fits and ("pattern" not in schema or re.fullmatch(schema["pattern"], value))
        return [] if fits else [f"{place}={value!r} does not fit {schema}"]
    if not isinstance(value, dict):
        return [f"{place} is not a mapping"]
    known = {name.rstrip("?"): (part, name.endswith("?")) for name, part in schema.items()}
    problems = [f"{place} has an unknown field {name}" for name in value if name not in known]
    for name, (part, optional) in known.items():
        if name in value:
            problems += misfits(value[name], part, f"{place}.{name}")
        elif not optional:
            problems.append(f"{place} lacks {name}")
    return problems


def printed(capsys, *words):
    assert main(["launch", "--print", *words]) == 0
    return capsys.readouterr().out


def test_the_files_of_deploy_are_what_is_printed(capsys):
    nodes = ("--nodes", "4", "--gpus-per-node", "8", "--name", "maxtext", "--", *TRAIN)
    assert printed(capsys, "k8s", *nodes) == (DEPLOY / "jobset.yaml").read_text()
    assert printed(capsys, "slurm", *nodes) == (DEPLOY / "train.sbatch").read_text()


def test_the_jobset_fits_its_schema_and_its_pods_find_each_other(capsys):
    manifest = yaml.safe_load(
        printed(capsys, "k8s", "--nodes", "4", "--gpus-per-node", "8", "--", *TRAIN)
    )
    assert not misfits(manifest, JOBSET)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["args"] == [
        *TRAIN[1:],
        "base_output_directory=/output",
        "enable_autocheckpoint=true",
    ]
    # As a pod sees it: the Job controller adds the index.
    environ = {entry["name"]: entry["value"] for entry in container["env"]} | {
        "JOB_COMPLETION_INDEX": "3"
    }
    place = rendezvous.detect(environ)
    name = manifest["metadata"]["name"]
    assert (place.index, place.count) == (3, 4)
    # pods are called <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>
    assert (
        place.coordinator == f"{name}-workers-0-0.{manifest['spec']['network']['subdomain']}:1234"
    )


def test_the_schema_can_fail():
    manifest = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    manifest["spec"]["replicatedJobs"][0]["replicas"] = "1"
    manifest["spec"]["sucessPolicy"] = {}
    del manifest["metadata"]["name"]
    assert len(misfits(manifest, JOBSET)) == 3


def test_a_jobset_of_tpu_slices(capsys):
    words = ("k8s", "--tpu-topology", "v5p:4x4x4", "--slices", "2", "--restarts", "5", "--", *TRAIN)
    manifest = yaml.safe_load(printed(capsys, *words))
    assert not misfits(manifest, JOBSET)
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 5
    replicated = manifest["spec"]["replicatedJobs"][0]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["parallelism"]) == (2, 64 // 4)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert [entry["name"] for entry in pod["containers"][0]["env"]] == ["JOBSET_NAME"]


def test_keys_of_the_file_are_kept(capsys, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "base_config: base.yml\nbase_output_directory: /data\nenable_autocheckpoint: "
        "false\nrun_name: mine\n"
    )
    manifest = printed(capsys, "k8s", "--", "train", str(file))
    assert "base_output_directory=" not in manifest
    assert "enable_autocheckpoint=true" not in manifest
    assert f"maxtext train {file} &" in printed(capsys, "slurm", "--", "train", str(file))


FAKE = """#!/bin/bash
echo "{name} $*" >> "$CALLS"
{body}
"""
FAKES = {
    "srun": 'echo "address $JAX_COORDINATOR_ADDRESS" >> "$CALLS"; sleep ${SRUN_SECONDS:-0}; exit '
    "${SRUN_CODE:-0}",
    "scontrol": '[ "$1" = show ] && printf "node007\\nnode008\\n"; exit 0',
    "scancel": "exit 0",
}


@pytest.fixture
def batch(capsys, tmp_path):
    """Runs a batch script as SLURM would, with its programs replaced by ones that write down how
    they were called.
    """
    script = tmp_path / "train.sbatch"
    words = (
        "slurm",
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--restarts",
        "3",
        "--time",
        "2:00:00",
        "--grace",
        "90",
    )
    script.write_text(printed(capsys, *words, "--", "train", "steps=5", "prompt=it's $HOME"))
    for name, body in FAKES.items():
        path = tmp_path / name
        path.write_text(FAKE.format(name=name, body=body))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"

    def run(signal_after=None, **environment):
        calls.write_text("")
        environ = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[007-008]", **environment,
        }  # fmt: skip
        process = subprocess.Popen(["bash", str(script)], env=environ)
        if signal_after is not None:
            while "srun" not in calls.read_text():
                time.sleep(0.02)
            process.send_signal(signal_after)
        return process.wait(timeout=20), calls.read_text().splitlines()

    run.script = script
    return run


def test_the_batch_script_is_bash_and_asks_for_what_it_needs(batch):
    assert subprocess.run(["bash", "-n", str(batch.script)]).returncode == 0
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in batch.script.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert asked == {
        "job-name": "maxtext", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8",
        "exclusive": "",
        "time": "2:00:00", "signal": "B:USR1@90", "requeue": "", "open-mode": "append",
        "output": "%x-%j.log",
    }  # fmt: skip
    first_command = next(
        number
        for number, line in enumerate(batch.script.read_text().splitlines())
        if line and not line.startswith("#")
    )
    assert "#SBATCH" not in "\n".join(batch.script.read_text().splitlines()[first_command:])


def test_the_batch_script_starts_the_run(batch):
    code, calls = batch()
    assert code == 0
    assert calls == [
        "scontrol show hostnames node[007-008]",
        "srun --kill-on-bad-exit=1 maxtext train steps=5 prompt=it's $HOME run_name=maxtext-4711 "
        "enable_autocheckpoint=true",
        "address node007:1234",
    ]


@pytest.mark.parametrize(
    ("code", "restarted", "requeued"),
    [("1", "0", True), ("137", "2", True), ("1", "3", False), ("2", "0", False)],
)
def test_a_failed_run_is_queued_again_but_not_for_ever(batch, code, restarted, requeued):
    exit_code, calls = batch(SRUN_CODE=code, SLURM_RESTART_COUNT=restarted)
    assert exit_code == int(code)
    assert ("scontrol requeue 4711" in calls) == requeued


def test_before_its_time_is_up_the_run_is_told_to_save_and_queued_again(batch):
    code, calls = batch(signal_after=signal.SIGUSR1, SRUN_SECONDS="1")
    assert code == 0
    assert calls[-2:] == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]


def test_the_image_is_not_run_by_root_and_needs_no_cloud():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER maxtext"]
    assert lines.index(users[0]) < next(
        i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT")
    )
    assert not re.search(r"gcloud|google|aws|apt-get", text)
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M)
    assert all((DEPLOY.parent / name).exists() for line in copied for name in line.split())


def test_what_the_coordinator_leaves_in_the_log_is_left_out():
    # the start of each line
    noise = """\
E1117 03:53:30.407845   29917 coordination_service_agent.cc:289] Polled an error from coordination
F1117 03:53:30.407887   29917 client.h:80] Terminating process because the JAX distributed service
Additional GRPC error information from remote target coordination_service while calling
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
*** Check failure stack trace: ***
    @     0x7f4a4550c93b  std::_Function_handler<>::_M_invoke()"""
    assert all(launch.COORDINATOR_NOISE.match(line) for line in noise.splitlines())
    for line in (
        "maxtext: error: no",
        "step 3/9  loss 2.0",
        "03:53:30 WARNING saved",
        "E1117 03:53:30.4 2 cuda.cc:9] bad",
    ):
        assert not launch.COORDINATOR_NOISE.match(line)
