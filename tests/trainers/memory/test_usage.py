"""Runs that need more memory than is free are refused with what would fit, by injected limits."""

import jax
import pytest

from maxtext.cli.main import main
from maxtext.common.errors import UserError
from maxtext.models.counts import parameter_count
from maxtext.sharding.memory import MemoryBytes
from maxtext.trainers import run_setup, train
from maxtext.trainers.build import build_run_context
from maxtext.trainers.compilation.compile import OutOfDeviceMemory, compile_train_step
from maxtext.trainers.memory import usage
from maxtext.trainers.memory.usage import FreeMemory
from tests.trainers.conftest import LENGTH

GIB = 2**30
SMALL = ("decoder_block=simple_mlp", "base_num_decoder_layers=2", "max_target_length=64")
PROMPTS = (
    "use_grpo=true", "packing=false", "dataset_type=grain", "grain_train_files=rows.jsonl",
    "grain_file_type=jsonl", "batch_size=12", "num_generations=4", "max_prefill_predict_length=8",
    "train_data_columns=[prompt]", "tokenizer_path=byte", "vocab_size=259",
)  # fmt: skip


def test_state_bytes(configure):
    """Three float32 arrays for each weight (the weight and two moments), and a few counters."""
    context = build_run_context(configure())
    weights = parameter_count(context.template.weights)
    assert 12 * weights <= usage.state_bytes(context).device <= 12 * weights + 100


def test_a_state_that_does_not_fit_is_refused_whatever_the_batch(configure, log_messages):
    context = build_run_context(configure())
    needed = usage.state_bytes(context).device
    usage.check_state(context, FreeMemory(needed))
    usage.check_state(context, FreeMemory(None))
    with pytest.raises(OutOfDeviceMemory, match="so no batch size fits: .*lora_rank=16.*--force"):
        usage.check_state(context, FreeMemory(needed - 1))
    forced = build_run_context(configure("check_memory=false"))
    usage.check_state(forced, FreeMemory(needed - 1))
    assert "expect it to fail or to swap" in log_messages[-1]


def test_a_shortage_of_host_memory_is_refused(configure):
    free = FreeMemory(GIB, host=3 * GIB)
    assert free.shortage(MemoryBytes(GIB, host=3 * GIB)) == ""
    assert FreeMemory(GIB).shortage(MemoryBytes(GIB, host=2**60)) == ""  # it is not known
    assert free.shortage(MemoryBytes(GIB, host=7 * GIB // 2)) == (
        "needs 3.50 GiB of host memory for each device, and 3.00 GiB are free"
    )


def test_an_offloaded_state_is_refused_by_the_memory_of_the_host(configure):
    """Of three float32 arrays for each weight, the two moments are on the host."""
    context = build_run_context(configure("optimizer_memory_host_offload=true"))
    host = 8 * parameter_count(context.template.weights)
    usage.check_state(context, FreeMemory(None, host=host))
    with pytest.raises(OutOfDeviceMemory, match="the state of training.* of host memory for each"):
        usage.check_state(context, FreeMemory(None, host=host - 1))


def test_a_state_that_does_not_fit_with_the_cache_of_a_rollout_is_refused(configure, log_messages):
    """48 rollouts, with the keys and values of 2 heads of 8 float32 numbers of each token. The
    engine samples fewer at a time if memory is short."""
    context = build_run_context(configure(*PROMPTS, "kv_cache_buffer=4"))
    state, cache = usage.state_bytes(context).device, (LENGTH + 4) * 2 * 2 * 8 * 4
    usage.check_state(context, FreeMemory(state + 48 * cache))
    assert not any("sampling" in message for message in log_messages)
    for free in (state + 48 * cache - 1, state + cache):
        usage.check_state(context, FreeMemory(free))
        assert "so fewer are sampled at a time: lower max_target_length=" in log_messages[-1]
    refusal = f"sampling one rollout with .* are free: lower max_target_length={LENGTH}; "
    with pytest.raises(OutOfDeviceMemory, match=refusal):
        usage.check_state(context, FreeMemory(state + cache - 1))


def test_offloaded_weights_are_on_the_device_while_rollouts_are_sampled(configure):
    keys = (
        "parameter_memory_host_offload=true", "optimizer_memory_host_offload=true",
        "kv_cache_buffer=0", "grpo_beta=0",
    )  # fmt: skip
    context = build_run_context(configure(*PROMPTS, *keys))
    weights = 4 * parameter_count(context.template.weights)
    needed = usage.sampling_bytes(context)
    caches = 48 * LENGTH * 2 * 2 * 8 * 4
    assert weights + caches <= needed.device <= weights + caches + 100
    assert needed.host == 3 * weights
    pretraining = build_run_context(configure())
    assert usage.sampling_bytes(pretraining) == MemoryBytes()


def test_weights_that_do_not_fit_are_refused_before_they_are_created(capsys, monkeypatch, tmp_path):
    """64 layers of 8192 need 16 bytes for each of 6e10 weights, more than any host of tests has."""
    monkeypatch.setattr(run_setup, "find_start", None)  # creates the weights
    model = ["base_emb_dim=8192", "base_num_decoder_layers=64", "base_mlp_dim=28672"]
    paths = [f"base_output_directory={tmp_path}", "run_name=it"]
    assert main(["train", *model, "dataset_type=synthetic", "steps=1", *paths]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "185.96 GiB of weights, needs 557.87 GiB on each device, and" in text


def test_force_starts_anyway(capsys, monkeypatch, tmp_path):
    def stop(*arguments):
        raise UserError("this run creates its weights")

    monkeypatch.setattr(run_setup, "find_start", stop)
    monkeypatch.setattr(FreeMemory, "measure", lambda: FreeMemory(1))
    model = ["decoder_block=simple_mlp", "base_emb_dim=16", "base_mlp_dim=16", "vocab_size=259"]
    paths = [f"base_output_directory={tmp_path}", "run_name=it"]
    command = ["train", *model, "dataset_type=synthetic", "steps=1", *paths]
    assert main(command) == 2
    assert main([*command, "--force"]) == 1
    assert "this run creates its weights" in capsys.readouterr().err


def test_the_largest_batch_that_fits_is_named(configure):
    """With the memory that a step of 5 rows needs, and a byte less; each is compiled."""
    context = build_run_context(configure(*SMALL, "per_device_batch_size=24"))
    fits = compiled(configure(*SMALL, "per_device_batch_size=5"))
    with pytest.raises(OutOfDeviceMemory, match=r"per_device_batch_size=24.* are free") as refusal:
        check(context, FreeMemory(fits))
    assert "per_device_batch_size=5 is the largest that fits; " in str(refusal.value)
    with pytest.raises(OutOfDeviceMemory, match="per_device_batch_size=4 is the largest that fits"):
        check(context, FreeMemory(fits - 1))


def test_a_step_that_fits_compiles_nothing_else(configure, monkeypatch):
    context = build_run_context(configure(*SMALL))
    step = compile_train_step(context, 8)
    monkeypatch.setattr(usage, "compile_train_step", None)
    free = FreeMemory(usage.step_bytes(step).device)
    assert usage.compile_and_check(context, free, lambda: step) is step


@pytest.mark.parametrize(
    ("overrides", "free", "advice"),
    [
        (("per_device_batch_size=100",), 10 * GIB, "per_device_batch_size=8 is the largest"),
        (("per_device_batch_size=100",), 3 * GIB, "per_device_batch_size=1 is the largest"),
        (("per_device_batch_size=100",), 3 * GIB - 1, "no per_device_batch_size fits with"),
        # 12 prompts of 4 completions divide into microbatches of 1, 2, 3, 4, 6 or 12 prompts
        (PROMPTS, 22 * GIB, "train_micro_batch_size=4 is the largest"),
        (PROMPTS, 31 * GIB, "train_micro_batch_size=6 is the largest"),
    ],
)
def test_batches_are_found_by_interpolation(configure, monkeypatch, overrides, free, advice):
    """A step of R rows needs 2 + R GiB."""
    compilations = []

    def needed(context, rows):
        compilations.append(rows)
        return MemoryBytes((2 + rows) * GIB)

    monkeypatch.setattr(usage, "compiled_bytes", needed)
    monkeypatch.setattr(usage, "state_bytes", lambda context: MemoryBytes(GIB))
    context = build_run_context(configure(*overrides))
    rows = context.config.micro_batch_size_to_train_on
    text = usage.describe_batch(context, FreeMemory(free), MemoryBytes((2 + rows) * GIB))
    assert text.startswith(advice)
    assert len(compilations) <= usage.MAX_COMPILATIONS


def test_a_batch_that_the_compiler_refuses_has_the_same_advice(configure, monkeypatch):
    def refuse():
        raise OutOfDeviceMemory("the compiler cannot fit the step: Used 17G of 16G hbm")

    monkeypatch.setattr(
        usage, "compiled_bytes", lambda context, rows: MemoryBytes(rows) if rows < 3 else None
    )
    context = build_run_context(configure())
    with pytest.raises(OutOfDeviceMemory, match="Used 17G.*; per_device_batch_size=2 is the larg"):
        usage.compile_and_check(context, FreeMemory(16 * GIB), refuse)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "device ran out of mem"),
        (MemoryError("Unable to allocate 1.00 PiB"), "machine ran out of memory .*1.00 PiB"),
    ],
)
@pytest.mark.parametrize("overrides", [(), PROMPTS])
def test_a_failed_allocation_is_one_sentence(
    configure, monkeypatch, tmp_path, error, said, overrides
):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(train, "train_locked", fail)
    key = "train_micro_batch_size" if overrides else "per_device_batch_size"
    with pytest.raises(UserError, match=f"{said}.*: lower {key}"):
        train.train(configure(*overrides, f"base_output_directory={tmp_path}", "run_name=it"))


def compiled(config):
    context = build_run_context(config)
    step = compile_train_step(context, config.global_batch_size_to_train_on)
    return usage.step_bytes(step).device


def check(context, free):
    rows = context.config.global_batch_size_to_train_on
    return usage.compile_and_check(context, free, lambda: compile_train_step(context, rows))
