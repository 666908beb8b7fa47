"""`maxtext doctor`: versions, devices, attention back ends and disk space of this machine, and
problems with their remedies.
"""

import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from maxtext.common.extras import install_command, libtpu_mismatch
from maxtext.common.hardware import GIB, lookup
from maxtext.common.processes import gpu_settings
from maxtext.kernels.attention import try_backends
from maxtext.layers.context import INFERENCE, TRAIN
from maxtext.models.configuration import load
from maxtext.models.transformer import build_context, implementations
from maxtext.sharding import AxisRules, make_mesh

PACKAGES = (
    "maxtext",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "pydantic",
)
SUPPORTED_JAX = ((0, 10), (0, 13))  # [first, last)
MIN_FREE_BYTES = 5 * GIB


@dataclass
class Report:
    """Sections of (name, value) lines, and (problem, remedy) pairs."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)


def diagnose(output_directory: str, environ: Mapping[str, str] = os.environ) -> Report:
    """Check this machine; `output_directory` is the folder of runs."""
    report = Report()
    report.sections["Versions"] = [("python", platform.python_version()), *versions()]
    report.problems += version_problems()
    report.sections["Devices"], problems = devices()
    report.problems += problems
    if problems:
        return report  # nothing below works without devices
    report.sections["Settings for JAX on GPUs (environment variables override them)"] = [
        *gpu_settings(environ).items()
    ]
    report.sections["Attention back ends"] = list(try_backends())
    report.sections["Implementations of a Llama on this machine"] = list(model_implementations())
    free = shutil.disk_usage(existing_parent(output_directory)).free
    report.sections["Disk"] = [(output_directory, f"{free / GIB:.1f} GiB free")]
    if free < MIN_FREE_BYTES:
        problem = f"only {free / GIB:.1f} GiB are free for {output_directory}"
        report.problems.append((problem, "free some space or set base_output_directory"))
    report.problems += environment_problems(environ)
    return report


def model_implementations() -> Iterator[tuple[str, str]]:
    """The implementations of the layers of an 8B Llama, for each use of the model."""
    cases = {
        "training in bfloat16": ([], TRAIN, 0),
        "training in fp8": (["quantization=fp8_full"], TRAIN, 0),
        "decoding one sequence": (["weight_dtype=bfloat16", "scan_layers=false"], INFERENCE, 1),
        "decoding a batch": (["weight_dtype=bfloat16", "scan_layers=false"], INFERENCE, 0),
    }
    for name, (overrides, mode, rows) in cases.items():
        config = load(None, ["model_name=llama3.1-8b", *overrides], environ={})
        rules = AxisRules.from_config(config, make_mesh(config))
        context = build_context(config, rules, mode=mode, decode_rows=rows)
        for part, description in implementations(config, context).items():
            yield f"{name}: {part}", description


def versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def version_problems() -> Iterator[tuple[str, str]]:
    for package, version in versions():
        if version == "not installed" and package != "maxtext":
            yield (
                f"{package} is not installed",
                "pip install -e . in the checkout",
            )
        if package == "jax" and version != "not installed":
            release = tuple(int(part) for part in version.split(".")[:2])
            if not SUPPORTED_JAX[0] <= release < SUPPORTED_JAX[1]:
                yield (
                    f"jax {version} has not been tested with this package",
                    'pip install "jax>=0.10,<0.13"',
                )
    if mismatch := libtpu_mismatch():
        yield mismatch, 'pip install "jax[tpu]", not the newest libtpu'


def devices() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(lines, problems): a line per kind of device; a start-up failure is a problem."""
    import jax

    try:
        kinds = Counter(device.device_kind for device in jax.devices())
    except RuntimeError as error:
        remedy = (
            "check the driver (nvidia-smi) and the extra (cuda13, cuda12, tpu), "
            "or set JAX_PLATFORMS=cpu"
        )
        problem = f"JAX finds no devices: {str(error).splitlines()[0]}"
        return [("devices", "none")], [(problem, remedy)]
    lines = [("platform", jax.default_backend()), ("processes", str(jax.process_count()))]
    lines += [(f"{count} x {kind}", describe_device(kind)) for kind, count in kinds.items()]
    return lines, []


def describe_device(kind: str) -> str:
    hardware = lookup(kind)
    if hardware is None:
        return "peak FLOP/s not known, so runs show no MFU"
    peaks = ", ".join(f"{dtype} {peak / 1e12:g}" for dtype, peak in hardware.peak.items())
    memory = f"{hardware.memory_bytes / GIB:.0f} GiB at {hardware.bandwidth / 1e9:g} GB/s"
    return f"{hardware.name}: dense peak TFLOP/s {peaks}; memory {memory}"


def existing_parent(path: str) -> str:
    """The closest existing parent of a folder that a run would create."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def environment_problems(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    import jax

    if jax.default_backend() == "cpu" and shutil.which("nvidia-smi"):
        yield (
            "an NVIDIA GPU seems present but JAX runs on the CPU",
            f"{install_command('cuda13')} and unset JAX_PLATFORMS",
        )
    if jax.default_backend() == "cpu" and os.path.exists("/dev/accel0"):
        yield (
            "a TPU seems present but JAX runs on the CPU",
            f"{install_command('tpu')} and unset JAX_PLATFORMS",
        )
    if (
        environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() == "false"
        and jax.default_backend() == "gpu"
    ):
        yield "XLA_PYTHON_CLIENT_PREALLOCATE=false fragments GPU memory in training", "unset it"
    if environ.get("JAX_DISABLE_JIT", "").lower() in ("1", "true"):
        yield "JAX_DISABLE_JIT is set: everything runs uncompiled", "unset it"
    if environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true"):
        yield "JAX_ENABLE_X64 is set: arrays default to 64 bits, which is slow", "unset it"
    if environ.get("PYTHONOPTIMIZE"):
        yield "PYTHONOPTIMIZE is set: internal checks are off", "unset it"
