"""A step from a file is the step that training would compile; otherwise it is rejected with the
reason."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from maxtext.common.errors import ConfigError, UserError
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.compilation import aot
from maxtext.trainers.compilation.aot import load_or_compile
from maxtext.trainers.compilation.compile import (
    OutOfDeviceMemory,
    compile_lowered,
    compiler_options,
    lower_train_step,
)
from maxtext.trainers.data_loader import to_devices


@pytest.fixture(scope="module")
def configure(configure):
    """Two matmuls a layer: a program that compiles in little time."""
    return lambda *overrides: configure("decoder_block=simple_mlp", *overrides)


@pytest.fixture(scope="module")
def saved(configure, tmp_path_factory):
    """(configuration, its compiled step, the file)."""
    path = tmp_path_factory.mktemp("aot") / "deep" / "step.bin"
    config = configure(f"compiled_trainstep_file={path}")
    context = build_run_context(config)
    lowered = lower_train_step(context, config.global_batch_size_to_train_on)
    compiled = aot.compile_without_cache(context, lowered)
    size = aot.save(str(path), context, lowered, compiled)
    assert path.stat().st_size == size
    return config, compiled, path


def no_compiler(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)


def train_step(config):
    return load_or_compile(build_run_context(config), config.global_batch_size_to_train_on)


@pytest.mark.slow
def test_a_loaded_step_runs_without_compiling(saved, packed, monkeypatch):
    config, compiled, _ = saved
    context = build_run_context(config)
    first = initial_state(context)
    second = jax.tree.map(jnp.copy, first)  # a step donates its state
    batch, key = to_devices(context, packed), context.key
    with monkeypatch.context() as patch:
        no_compiler(patch)
        loaded = train_step(config)
    assert (
        loaded.memory_analysis().argument_size_in_bytes
        == compiled.memory_analysis().argument_size_in_bytes
    )
    one, losses = loaded(first, batch, key)
    two, expected = compiled(second, batch, key)
    assert losses["loss"] == expected["loss"]
    jax.tree.map(np.testing.assert_array_equal, one.weights, two.weights)
    again, _ = loaded(one, batch, key)  # what it returns, it takes
    assert int(again.step) == 2


@pytest.mark.slow
def test_a_step_in_the_persistent_cache_can_be_saved(configure, packed, tmp_path):
    config = configure(f"compiled_trainstep_file={tmp_path / 'step.bin'}", "learning_rate=0.125")
    context = build_run_context(config)
    state = initial_state(context)
    first, lowered = (
        lower_train_step(context, config.global_batch_size_to_train_on) for _ in range(2)
    )
    keys = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {key: getattr(jax.config, key) for key in keys}
    try:
        compilation_cache.reset_cache()
        for key, value in keys.items():
            jax.config.update(key, value)
        compile_lowered(context, first)
        assert list((tmp_path / "cache").iterdir())
        aot.save(
            config.compiled_trainstep_file,
            context,
            lowered,
            aot.compile_without_cache(context, lowered),
        )
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()
    _, metrics = train_step(config)(state, to_devices(context, packed), context.key)
    assert np.isfinite(metrics["loss"])


def test_run_name_and_folders_do_not_change_the_program(saved, configure, monkeypatch):
    path = saved[2]
    no_compiler(monkeypatch)
    overrides = (
        "run_name=another",
        "base_output_directory=elsewhere",
        "log_period=7",
        "metrics_file=there.jsonl",
    )
    assert train_step(configure(f"compiled_trainstep_file={path}", *overrides))


OTHER = {
    "learning_rate=0.25": "learning_rate=.* there, 0.25 here",
    "base_mlp_dim=48": "base_mlp_dim=32 there, 48 here",
    "per_device_batch_size=4": "per_device_batch_size=8.* there, 4.* here",
    "matmul_precision=default": "matmul_precision=highest there, default here",
    "compile_xla_flags=--xla_backend_optimization_level=0": "compile_xla_flags=.* there, "
    "--xla_backend.*=0 here",
}


@pytest.mark.parametrize("override", OTHER)
def test_a_step_of_other_settings_is_rejected(saved, configure, override, monkeypatch):
    no_compiler(monkeypatch)
    with pytest.raises(
        ConfigError, match=f"was compiled for another run: {OTHER[override]}"
    ) as caught:
        train_step(configure(f"compiled_trainstep_file={saved[2]}", override))
    assert "\n" not in str(caught.value)
    assert "maxtext compile" in str(caught.value)


MACHINES = {
    "jax": "0.9.9",
    "platform": "tpu",
    "device_kind": "TPU v5p",
    "devices": 64,
    "processor": "x86_64 0",
}


@pytest.mark.parametrize("fact", MACHINES)
def test_a_step_of_another_machine_is_rejected(saved, configure, tmp_path, fact):
    line, _, executable = saved[2].read_bytes().partition(b"\n")
    other = tmp_path / "step.bin"
    other.write_bytes(
        json.dumps(json.loads(line) | {fact: MACHINES[fact]}).encode() + b"\n" + executable
    )
    with pytest.raises(
        ConfigError, match=f"{fact.replace('_', ' ')} {MACHINES[fact]} there, .* here"
    ):
        train_step(configure(f"compiled_trainstep_file={other}"))


@pytest.mark.slow
def test_a_damaged_file_is_rejected(saved, configure, tmp_path):
    data = saved[2].read_bytes()
    other = tmp_path / "step.bin"
    override = f"compiled_trainstep_file={other}"
    with pytest.raises(UserError, match="cannot read .*No such file"):
        train_step(configure(override))
    for damaged in (data[:-1], data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]):
        other.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged: compile it again"):
            train_step(configure(override))
    for foreign in (b"", b"hello\nworld", b'{"a": 1}\n', b"[1]\n"):
        other.write_bytes(foreign)
        with pytest.raises(UserError, match="is not a file of `maxtext compile`"):
            train_step(configure(override))
    line, _, rest = data.partition(b"\n")
    other.write_bytes(json.dumps(json.loads(line) | {"version": 99}).encode() + b"\n" + rest)
    with pytest.raises(UserError, match="is of another version"):
        train_step(configure(override))


def test_reports_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*is not a writable folder"):
        aot.check_writable(str(tmp_path / "file" / "step.bin"))
    with pytest.raises(UserError, match="is a folder: name a file"):
        aot.check_writable(str(tmp_path))
    aot.check_writable(str(tmp_path / "new" / "deep" / "step.bin"))


def test_parses_compile_xla_flags():
    assert compiler_options("--xla_a=b  --xla_tpu_c=1") == {"xla_a": "b", "xla_tpu_c": "1"}
    assert compiler_options("") == {}
    for wrong in ("xla_a=b", "--xla_a", "--xla_a=", "--other=1"):
        with pytest.raises(ConfigError, match="is not of the form --xla_name=value"):
            compiler_options(wrong)


def test_compile_xla_flags_reach_the_compiler(configure, monkeypatch):
    given = []
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, options=None: given.append(options)
    )
    train_step(
        configure(
            "compile_xla_flags=--xla_backend_optimization_level=0 --xla_cpu_enable_fast_math=true"
        )
    )
    assert given[0] == {"xla_backend_optimization_level": "0", "xla_cpu_enable_fast_math": "true"}


@pytest.mark.parametrize(
    ("flags", "options"),
    [("", {"xla_backend_optimization_level": 1}), ("--xla_backend_optimization_level=0", {})],
)
def test_xla_flags_override_default_options(configure, monkeypatch, flags, options):
    given = []
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, options=None: given.append(options)
    )
    train_step(configure())
    assert given[0] == options


def test_reports_a_flag_that_xla_rejects(configure):
    with pytest.raises(
        ConfigError, match="compile_xla_flags='--xla_no_such_thing=1': XLA refuses it: .*No such"
    ):
        train_step(configure("compile_xla_flags=--xla_no_such_thing=1"))


def test_training_rejects_compile_topology(configure):
    config = configure("compile_topology=v5p-8", "compile_topology_num_slices=1")
    with pytest.raises(
        ConfigError, match="compile_topology=v5p-8 is for maxtext compile and estimate"
    ):
        train_step(config)


def test_invalid_combinations_of_aot_keys_are_rejected(configure):
    with pytest.raises(
        ConfigError, match="compile_topology=v5p-8 needs compile_topology_num_slices"
    ):
        configure("compile_topology=v5p-8")
    with pytest.raises(
        ConfigError, match="compile_topology_num_slices=2 .* needs compile_topology"
    ):
        configure("compile_topology_num_slices=2")
    ramp = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=4",
        "per_device_batch_size_increment=4",
    )
    with pytest.raises(ConfigError, match="compiled_trainstep_file holds one program"):
        configure("compiled_trainstep_file=f", *ramp)
    with pytest.raises(
        ConfigError, match="internal_compile=True .*Google-internal names; use compile_topology"
    ):
        configure("internal_compile=true")


def test_reports_a_step_that_does_not_fit(configure, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. "
            "Used 120.50G of 95.74G hbm. Exceeded hbm capacity by 24.76G.\n\nTotal hbm usage >= "
            "121.02G"
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(
        OutOfDeviceMemory,
        match="cannot fit the step: Used 120.50G of 95.74G hbm. Exceeded hbm capacity by 24.76G$",
    ):
        train_step(configure())
