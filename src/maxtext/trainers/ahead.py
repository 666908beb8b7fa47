"""The train step compiled ahead of time: for this machine or another's devices, kept in a file,
loaded by training.

A file is one line of JSON, which says what the program is for, then the executable. Training lowers
its own step and runs a loaded one only where the two programs are the same to the letter; otherwise
it says what differs. The executable is unpickled: load only files that you trust.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import atomic_writer
from maxtext.common.log import LOGGER
from maxtext.configs import text
from maxtext.configs.types import AOT, DerivedValues
from maxtext.trainers.setup import COMPILER_OPTIONS, Setup

MARK = "maxtext compiled train step"
VERSION = 1
SHORTAGE = re.compile(
    r"Used \S+ of \S+ \w+\. Exceeded .*? by [\d.]+\w+"
)  # in what the compiler of TPUs says
# Where a run's output goes and what it is called shapes no program.
BESIDE = {"run_name", "base_output_directory", "base_config", "jax_cache_dir", *AOT.model_fields}


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """As Setup.compile, with compile_xla_flags."""
    flags = compiler_options(setup.config.compile_xla_flags)
    try:
        if not flags:
            return setup.compile(lowered)
        return lowered.compile({**COMPILER_OPTIONS.get(platform_of(setup), {}), **flags})
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        if message.startswith("RESOURCE_EXHAUSTED"):
            said = SHORTAGE.search(message)
            raise TooSmall(
                f"the compiler cannot fit the step: {said[0] if said else message[:200]}"
            ) from error
        if flags and ("option" in message.lower() or any(flag in message for flag in flags)):
            shown = setup.config.compile_xla_flags
            raise ConfigError(
                f"compile_xla_flags={shown!r}: XLA refuses it: {message[:300]}"
            ) from error
        raise


def compile_to_save(setup: Setup, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """`compile_step` without JAX's cache: on CPUs, an executable that comes from there lacks
    functions once it has been written again and loaded."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which is when JAX looks at the key again
    try:
        return compile_step(setup, lowered)
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class TooSmall(ConfigError):
    """The devices have less memory than the step needs."""


def platform_of(setup: Setup) -> str:
    return setup.rules.mesh.devices.flat[0].platform


def compiler_options(flags: str) -> dict[str, str]:
    """`--xla_a=b --xla_c=d` as {"xla_a": "b", "xla_c": "d"}."""
    options = {}
    for word in flags.split():
        name, equals, value = word.partition("=")
        if not name.startswith("--xla") or not equals or not value:
            raise ConfigError(f"compile_xla_flags: {word!r} is not of the form --xla_name=value")
        options[name.removeprefix("--")] = value
    return options


def train_step(setup: Setup, rows: int) -> jax.stages.Compiled:
    """What training runs: the step of compiled_trainstep_file, or one compiled now."""
    config = setup.config
    if config.compile_topology:
        raise ConfigError(
            f"compile_topology={config.compile_topology} is for maxtext compile and estimate; training runs on the "
            "devices that are here: leave it out"
        )
    lowered = setup.lower_train_step(rows)
    if not config.compiled_trainstep_file:
        return compile_step(setup, lowered)
    compiled = load(config.compiled_trainstep_file, setup, lowered)
    LOGGER.info("the train step comes from %s and is not compiled", config.compiled_trainstep_file)
    return compiled


def facts(setup: Setup, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """What a program is for."""
    config = setup.config
    devices = setup.rules.mesh.devices.flat
    keys = [
        key
        for key in text.KEYS_IN_ORDER
        if key not in BESIDE and key not in DerivedValues.model_fields
    ]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": devices[0].platform,
        "processor": processor() if devices[0].platform == "cpu" else "",
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "device_order": [device.id for device in devices],
        "program": hashlib.sha256(
            f"{config.compile_xla_flags}\n{lowered.as_text()}".encode()
        ).hexdigest(),
        "config": {key: text.plain(getattr(config, key)) for key in keys},
    }


@cache
def processor() -> str:
    """A mark of the instructions that this machine's processor has: compiled code may use all of
    them.
    """
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


def save(
    path: str, setup: Setup, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled
) -> int:
    """Writes the file, complete or not at all; returns its size."""
    executable, _, _ = serialize_executable.serialize(compiled)
    header = {"mark": MARK, "version": VERSION, "digest": hashlib.sha256(executable).hexdigest()}
    line = json.dumps(header | facts(setup, lowered)).encode() + b"\n"
    try:
        with atomic_writer(path, "wb") as stream:
            stream.write(line)
            stream.write(executable)
    except OSError as error:
        raise unwritable(path, error) from error
    return len(line) + len(executable)


def check_writable(path: str) -> None:
    """Before minutes of compiling: whether the file could be written."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if Path(path).is_dir():
        raise UserError(f"compiled_trainstep_file={path} is a folder: name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"cannot write compiled_trainstep_file={path}: {folder} is not a folder to write in"
        )


def unwritable(path: str, error: OSError) -> UserError:
    return UserError(f"cannot write compiled_trainstep_file={path}: {error.strerror or error}")


def load(path: str, setup: Setup, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The step of a file, if it is the program of this run on these devices."""
    header, executable = read(path)
    here = facts(setup, lowered)
    wrong = differences(header, here)
    if wrong:
        raise ConfigError(
            f"compiled_trainstep_file={path} was compiled for another run: {wrong}; compile it again with "
            "`maxtext compile` and this run's settings, or leave it out"
        )
    devices = list(setup.rules.mesh.devices.flat)
    try:
        return serialize_executable.deserialize_and_load(
            executable,
            lowered.in_tree,
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=devices,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"compiled_trainstep_file={path} cannot be loaded on this machine: {str(error).splitlines()[0]}; "
            "compile it again with `maxtext compile`"
        ) from error


def read(path: str) -> tuple[dict[str, Any], bytes]:
    """The header and the executable of a file that is whole."""
    try:
        line, _, executable = Path(path).read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(
            f"cannot read compiled_trainstep_file={path}: {error.strerror or error}"
        ) from error
    try:
        header = json.loads(line)
    except ValueError:
        header = {}
    if not isinstance(header, dict) or header.get("mark") != MARK:
        raise UserError(f"compiled_trainstep_file={path} is not a file of `maxtext compile`")
    if header.get("version") != VERSION:
        raise UserError(
            f"compiled_trainstep_file={path} is of another version: compile it again with `maxtext compile`"
        )
    if hashlib.sha256(executable).hexdigest() != header["digest"]:
        raise UserError(
            f"compiled_trainstep_file={path} is damaged: compile it again with `maxtext compile`"
        )
    return header, executable


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What keeps a saved program from running here, or nothing."""
    wrong = [
        f"{name.replace('_', ' ')} {saved[name]} there, {here[name]} here"
        for name in ("jax", "jaxlib", "platform", "processor", "device_kind", "devices")
        if saved[name] != here[name]
    ]
    if wrong:
        return ", ".join(wrong)
    if saved["program"] == here["program"] and saved["device_order"] == here["device_order"]:
        return ""
    keys = [
        f"{key}={value} there, {here['config'][key]} here"
        for key, value in saved["config"].items()
        if value != here["config"].get(key)
    ]
    return ", ".join(keys) or "its program is not this version's, with the same keys"
