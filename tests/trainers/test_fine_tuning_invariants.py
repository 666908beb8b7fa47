"""Fine-tuning does not depend on how it is run: packed rows equal unpacked ones, eight devices
equal one, and a run that is killed and resumed equals an uninterrupted one bit for bit.

The oracle of every comparison is the uninterrupted run on one device over unpacked rows, which
tests/parity/test_fine_tuning.py and test_distillation.py compare with torch. Every step sees all
rows once, so a step has the same rows in each of these ways.

As a program, this file trains on the eight devices of its process.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext import LLM, tune
from maxtext.trainers import banner
from tests.compiling import cpu_devices
from tests.tokenizers.tiny import write_bpe

ROOT = Path(__file__).parents[2]
STEPS, LENGTH = 3, 40
MODEL = {
    "vocab_size": 400,
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_num_decoder_layers": 1,
}
MODELS = {
    "llama": MODEL | {"decoder_block": "llama2", "base_mlp_dim": 48},
    "teacher": MODEL | {"decoder_block": "llama2", "base_mlp_dim": 64, "init_weights_seed": 1},
    "mixtral": MODEL
    | {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 24,
    },
}
KEYS = {
    "steps": STEPS,
    "num_epoch": STEPS,
    "max_target_length": LENGTH,
    "packing": False,
    "enable_data_shuffling": False,
    "grain_worker_count": 0,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "remat_policy": "none",
    "scan_layers": False,
    "learning_rate": 0.05,
    "learning_rate_schedule_steps": STEPS,
    "learning_rate_final_fraction": 1.0,
    "warmup_steps_fraction": 0.0,
    "adam_eps": 0.01,  # large, so that Adam does not magnify rounding errors
    "gradient_clipping_threshold": 0.0,
    "checkpoint_period": 1,
    "async_checkpointing": False,
    "enable_tensorboard": False,
}
LORA = {"lora_rank": 4}
EXPERTS = "layers/0/mlp/experts/.*"
FSDP_TENSOR = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
# method, model, keys
CASES = {
    "sft": ("sft", "llama", {}),
    "lora": ("sft", "llama", LORA),
    "qlora": ("sft", "llama", LORA | {"lora_weight_qtype": "nf4", "lora_tile_size": 16}),
    "dpo": ("dpo", "llama", {}),
    "dpo_lora": ("dpo", "llama", LORA),
    "distill": ("distill", "llama", {"use_sft": True, "sft_train_on_completion_only": True}),
    "moe_lora": ("sft", "mixtral", LORA | {"lora_module_path": EXPERTS}),
}
MESHES = dict.fromkeys(CASES, FSDP_TENSOR) | {
    "moe_lora": {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 4}
}
TEXTS = ["no", "we slept", "it is hot tea", "seven", "the fox", "a lazy dog", "2", "brew it cool"]


def messages(role, text):
    return [{"role": role, "content": text}]


PROMPTS = [messages("user", f"say {number}") for number in range(len(TEXTS))]
ROWS = {
    "sft": [
        {"messages": prompt + messages("assistant", text)}
        for prompt, text in zip(PROMPTS, TEXTS, strict=True)
    ],
    "dpo": [
        {"prompt": prompt, "chosen": messages("assistant", a), "rejected": messages("assistant", b)}
        for prompt, a, b in zip(PROMPTS, TEXTS, reversed(TEXTS), strict=True)
    ],
}


def fine_tune(case, models, folder=None, **overrides):
    """Train on the devices of this process. `models`: the folder that has them."""
    method, model, keys = CASES[case]
    keys = KEYS | {"per_device_batch_size": len(TEXTS) // len(jax.devices())} | keys | overrides
    if folder is not None:
        keys |= {"base_output_directory": str(folder), "run_name": case}
    rows = ROWS.get(method, ROWS["sft"])
    if method == "distill":
        return tune.distill(models / model, models / "teacher", rows, **keys)
    return getattr(tune, method)(models / model, rows, **keys)


def losses(run):
    return [metrics["loss"] for metrics in run.metrics]


def weights(run):
    leaves = jax.tree.leaves_with_path(run.result.state.weights)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a Hugging Face folder for each model."""
    folder = tmp_path_factory.mktemp("models")
    for name, keys in MODELS.items():
        LLM.load("default", **keys).save_hf(folder / name)
        write_bpe(folder / name)
    return folder


def skip_plots(patch):
    """Drawing loss.png takes a third of the time of a short run."""
    patch.setattr(banner, "save_loss_png", lambda *_, **__: None)


@pytest.fixture(scope="module", autouse=True)
def no_plots():
    with pytest.MonkeyPatch.context() as patch:
        skip_plots(patch)
        yield


@pytest.fixture(scope="module")
def one_device(models, light_compiler, tmp_path_factory):
    """(a case) -> its uninterrupted run, trained once."""
    runs = {}
    folder = tmp_path_factory.mktemp("one_device")

    def get(case):
        if case not in runs:
            runs[case] = fine_tune(case, models, folder)
        return runs[case]

    return get


@pytest.fixture(scope="module")
def eight_devices(models, request, tmp_path_factory):
    """(losses, weights, is sharded) of each case that runs, on eight devices."""
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.module is request.module and "eight_devices" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("eight_devices")
    command = [sys.executable, "-m", "tests.trainers.test_fine_tuning_invariants"]  # in cwd
    done = subprocess.run(
        [*command, str(models), str(folder), *cases],
        env=os.environ | cpu_devices(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    return {case: (*reports[case], np.load(folder / f"{case}.npz")) for case in cases}


@pytest.mark.slow
@pytest.mark.representative("sft", "dpo", "distill", "moe_lora")
@pytest.mark.parametrize("case", CASES)
def test_eight_devices_equal_one(case, one_device, eight_devices):
    expected = one_device(case)
    eight_losses, is_sharded, eight_weights = eight_devices[case]
    assert is_sharded
    np.testing.assert_allclose(eight_losses, losses(expected), rtol=1e-5)
    assert losses(expected)[-1] < losses(expected)[0]
    assert eight_weights.keys() == weights(expected).keys()
    for name, weight in weights(expected).items():
        np.testing.assert_allclose(eight_weights[name], weight, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.representative("dpo", "dpo_lora")
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(case, one_device, models, tmp_path):
    """What a kill after the first step leaves is the checkpoint of that step."""
    expected = one_device(case)
    checkpoint = Path("checkpoints") / "1"
    shutil.copytree(expected.folder / checkpoint, tmp_path / case / checkpoint)
    resumed = fine_tune(case, models, tmp_path)
    assert [metrics["step"] for metrics in resumed.metrics] == [1, 2]
    assert losses(resumed) == losses(expected)[1:]
    for name, weight in weights(expected).items():
        np.testing.assert_array_equal(weights(resumed)[name], weight, err_msg=name)


@pytest.mark.slow
def test_precomputed_reference_is_extended_by_a_longer_run(models, tmp_path):
    """A run of one step has the reference of its batch; resumed, it computes that of the others."""
    keys = {"per_device_batch_size": 2, "num_epoch": 1, "precompute_reference_logps": True}
    expected = fine_tune("dpo_lora", models, tmp_path / "whole", **keys)
    fine_tune("dpo_lora", models, tmp_path / "parts", steps=1, **keys)
    resumed = fine_tune("dpo_lora", models, tmp_path / "parts", **keys)
    assert [metrics["step"] for metrics in resumed.metrics] == [1, 2]
    assert losses(resumed) == losses(expected)[1:]


@pytest.mark.representative("lora")
@pytest.mark.parametrize("case", ["lora", "sft", "qlora", "distill"])
@pytest.mark.slow
def test_packed_equals_unpacked(case, one_device, models):
    """All rows fit into one, and no other does."""
    lengths = [len(tune.encode(row, tokenizer=models / "llama")["ids"]) - 1 for row in ROWS["sft"]]
    packed = fine_tune(
        case, models, packing=True, per_device_batch_size=1, max_target_length=sum(lengths)
    )
    assert max(lengths) <= LENGTH
    np.testing.assert_allclose(losses(packed), losses(one_device(case)), rtol=1e-5)
    for name, weight in weights(one_device(case)).items():
        np.testing.assert_allclose(weights(packed)[name], weight, atol=2e-5, err_msg=name)


def main(models, folder, cases):
    """Train the cases; write their weights, and print losses and whether weights are sharded."""
    skip_plots(pytest.MonkeyPatch())
    reports = {}
    for case in cases:
        run = fine_tune(case, models, **MESHES[case])
        np.savez(
            folder / f"{case}.npz", **{name: np.asarray(x) for name, x in weights(run).items()}
        )
        is_sharded = not all(x.sharding.is_fully_replicated for x in weights(run).values())
        reports[case] = losses(run), is_sharded
    print(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
