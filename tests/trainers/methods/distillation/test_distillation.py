"""Distillation against torch: a student and a teacher of transformers, over packed documents."""

import json
import math

import jax
import numpy as np
import pytest
import torch
import transformers

from maxtext.checkpoint.weights import ModelWeights
from maxtext.common.errors import ConfigError
from maxtext.common.trees import flatten_dict
from maxtext.optimizers import parameter_paths
from maxtext.sharding import use_rules
from maxtext.sharding.topology import find_target
from maxtext.trainers import tune
from maxtext.trainers.checkpointing.init_state import initial_state
from maxtext.trainers.memory.estimate import estimate_memory
from maxtext.trainers.methods.distillation.objective import loss_coefficients
from maxtext.trainers.methods.distillation.teacher import pop_features
from maxtext.trainers.step import make_eval_step
from tests.support.distillation import (
    PROBE,
    RATE,
    Z_LOSS,
    Run,
    documents,
    save_llama,
    torch_losses,
)
from tests.trainers.conftest import LENGTH, VOCABULARY

WITH_Z_LOSS = f"z_loss_multiplier={Z_LOSS}"


@pytest.fixture(scope="module")
def narrow_teacher(tmp_path_factory):
    """The folder and the model of a teacher of the student's width, with two layers."""
    folder = tmp_path_factory.mktemp("narrow")
    return folder, save_llama(folder, layers=2, embed_dim=16, seed=2)


@pytest.fixture(scope="module")
def start(models, quickly):
    return lambda *overrides: Run(models[0], *overrides, quickly=quickly)


@pytest.fixture(scope="module")
def batch(packed):
    """Packed documents; every third target is not trained on."""
    mask = np.arange(LENGTH) % 3 != 2
    return packed | {"targets_segmentation": packed["targets_segmentation"] * mask}


@pytest.fixture(scope="module")
def updated(start, batch):
    """The metrics of one step, and logits of the student after it."""
    run = start(WITH_Z_LOSS)
    state, metrics = run.step(run.state(), batch)
    return metrics, run.logits(state.weights, PROBE)


@pytest.mark.slow
def test_update_of_packed_masked_rows_equals_torch(models, updated, batch):
    folders, _, teacher = models
    student = transformers.LlamaForCausalLM.from_pretrained(folders["student"])
    expected = torch_losses(student, teacher, batch)
    expected["loss"].backward()
    torch.optim.SGD(student.parameters(), lr=RATE).step()
    metrics, logits = updated
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5), name
    with torch.no_grad():
        np.testing.assert_allclose(logits, student(torch.tensor(PROBE)).logits, atol=2e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ("num_vocab_tiling=4",),
        ("gradient_accumulation_steps=2", "per_device_batch_size=4"),
        ("scan_layers=true", "remat_policy=full"),
    ],
    ids=lambda overrides: overrides[0],
)
@pytest.mark.slow
def test_memory_settings_do_not_change_the_update(start, updated, batch, overrides):
    run = start(WITH_Z_LOSS, *overrides)
    state, metrics = run.step(run.state(), batch)
    for name in ("loss", "soft_loss", "hard_loss", "teacher_loss", "kl", "distill_alpha"):
        assert metrics[name] == pytest.approx(updated[0][name], rel=1e-5), name
    np.testing.assert_allclose(run.logits(state.weights, PROBE), updated[1], atol=1e-5)


@pytest.mark.slow
def test_teacher_stays_as_it_was_and_has_matrices_in_the_compute_dtype(start, batch):
    run = start("dtype=bfloat16")
    state = run.state()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {np.dtype("float32")}
    for path, leaf in flatten_dict(state.reference).items():
        assert leaf.dtype == ("float32" if path[-1] == "scale" else "bfloat16"), path
    after, _ = run.step(state, batch)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), state.reference, after.reference)
    )


def attention_outputs(model, layer, inputs):
    outputs = []
    projection = model.model.layers[layer].self_attn.o_proj
    hook = projection.register_forward_hook(lambda module, args, out: outputs.append(out))
    model(inputs)
    hook.remove()
    return outputs[0]


@pytest.mark.parametrize("kind", ["cosine", "l2"])
def test_features_equal_torch(models, narrow_teacher, start, batch, kind):
    student = transformers.LlamaForCausalLM.from_pretrained(models[0]["student"])
    folder, teacher = narrow_teacher
    expected = torch_losses(student, teacher, batch)
    total, tokens = 0.0, 0
    for inputs, _, mask in documents(batch):
        a, b = (attention_outputs(model, 0, inputs) for model in (student, teacher))
        if kind == "cosine":
            distance = 1 - torch.cosine_similarity(a, b.detach(), dim=-1)
        else:
            distance = (a - b.detach()).square().mean(-1)
        total, tokens = total + (distance * mask).sum(), tokens + int(mask.sum())
    loss = expected["loss"] + 3.0 * total / tokens
    loss.backward()
    torch.optim.SGD(student.parameters(), lr=RATE).step()
    run = start(
        f"teacher_overrides.load_parameters_path={folder}", "distill_beta=3.0", WITH_Z_LOSS,
        f"distill_feature_loss_type={kind}", "distill_layer_indices=[0]",
    )  # fmt: skip
    state, metrics = run.step(run.state(), batch)
    assert metrics["feature_loss"] == pytest.approx((total / tokens).item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        logits = student(torch.tensor(PROBE)).logits
    np.testing.assert_allclose(run.logits(state.weights, PROBE), logits, atol=2e-5)


def test_features_are_in_the_order_of_the_layers():
    """Two segments: one layer, then a pattern of two layers, repeated twice."""
    feature = {number: np.full((1, 2, 3), number, np.float32) for number in range(5)}

    def aux(*layers):
        outputs = np.stack([feature[layer] for layer in layers])
        return {"attention_output": outputs, "expert_load": np.ones(len(layers))}

    blocks = {0: {"blocks": {0: aux(0)}}, 1: {"blocks": {0: aux(1, 3), 1: aux(2, 4)}}}
    rest, features = pop_features({"layers": blocks}, [4, 1])
    np.testing.assert_array_equal(features[:, 0, 0, 0], [4, 1])
    _, features = pop_features({"layers": blocks}, None)
    np.testing.assert_array_equal(features[:, 0, 0, 0], range(5))
    assert rest["layers"][1]["blocks"][1].keys() == {"expert_load"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "16 features in the student and 24 in the teacher"),
        (("narrow",), "the student has 1 layers and the teacher 2"),
        (("narrow", "distill_layer_indices=[1]"), "and the student has layers 0 to 0"),
    ],
)
def test_features_that_cannot_be_compared_are_refused(start, narrow_teacher, overrides, message):
    path = f"teacher_overrides.load_parameters_path={narrow_teacher[0]}"
    overrides = [path if override == "narrow" else override for override in overrides]
    with pytest.raises(ConfigError, match=message):
        start("distill_beta=1", *overrides)


@pytest.mark.slow
def test_only_matched_parameters_are_updated_and_have_optimizer_state(start, batch):
    run = start("student_params_to_update=[attention/(query|key), final_norm]", "opt_type=adamw")
    state = run.state()
    after, _ = run.step(state, batch)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.weights, after.weights)
    paths = jax.tree.leaves(parameter_paths(changed))
    names = {
        path for path, is_changed in zip(paths, jax.tree.leaves(changed), strict=True) if is_changed
    }
    attention = "layers/0/blocks/0/0/attention"
    assert names == {f"{attention}/query/weight", f"{attention}/key/weight", "final_norm/scale"}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(names)


def parameter(run, weights, name):
    """A parameter of the student by its name."""
    return np.asarray(ModelWeights(weights, run.context.objective.maps.student).get(name))


@pytest.mark.parametrize("scan_layers", ["true", "false"])
def test_parameters_are_copied_from_the_teacher_before_the_first_step(
    start, narrow_teacher, scan_layers
):
    run = start(
        f"teacher_overrides.load_parameters_path={narrow_teacher[0]}",
        r"distill_weights_copy_map={layers/1/mlp/(.*): layers/0/mlp/\1, head/weight: head/weight}",
        f"scan_layers={scan_layers}",
    )
    state, before = run.state(), initial_state(run.context).weights
    teacher = narrow_teacher[1].model.layers[1].mlp
    up = parameter(run, state.weights, "layers/0/mlp/wi_1/weight")
    np.testing.assert_array_equal(up, teacher.up_proj.weight.detach().numpy().T)
    head = parameter(run, state.weights, "head/weight")
    np.testing.assert_array_equal(head, narrow_teacher[1].lm_head.weight.detach().numpy().T)
    for name in ("layers/0/attention/query/weight", "embedder/embedding"):
        same = parameter(run, state.weights, name) == parameter(run, before, name)
        assert same.all(), name


@pytest.mark.parametrize("scan_layers", ["true", "false"])
@pytest.mark.slow
def test_shared_parameters_stay_equal_and_sum_their_gradients(
    narrow_teacher, quickly, batch, scan_layers
):
    """A student of two layers, both with the query weight of layer 0."""
    folder, model = narrow_teacher
    name = "layers/{}/attention/query/weight"
    run = Run(
        {"student": folder, "teacher": folder},
        rf"distill_student_weights_share_map={{{name.format(0)}: {name.format(1)}}}",
        f"scan_layers={scan_layers}",
        "distill_alpha=0",
        quickly=quickly,
    )
    state, _ = run.step(run.state(), batch)
    student = transformers.LlamaForCausalLM.from_pretrained(folder)
    first, second = (layer.self_attn.q_proj for layer in student.model.layers)
    second.weight = first.weight
    torch_losses(student, model, batch)["hard_loss"].backward()
    torch.optim.SGD([first.weight], lr=RATE).step()
    weights = [parameter(run, state.weights, name.format(layer)) for layer in (0, 1)]
    np.testing.assert_array_equal(*weights)
    expected = first.weight.detach().numpy().T.reshape(weights[0].shape)
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("distill_weights_copy_map={layer/0/.*: head/weight}", "'layer/0/.*' matches no parameter"),
        (
            "distill_weights_copy_map={layers/1/(.*): layers/1/\\1}",
            "and the student has no such",
        ),
        ("distill_weights_copy_map={head/weight: embedder/embedding}", "has the shape"),
        (
            "distill_student_weights_share_map={.*/(key)/weight: layers/0/attention/query/weight}",
            "has the shape",
        ),
    ],
)
def test_weight_maps_that_do_not_fit_are_refused(start, mapping, message):
    with pytest.raises(ConfigError, match=message):
        start(mapping)


def test_evaluation_is_the_loss_of_the_student_alone(models, start, batch):
    _, student, teacher = models
    run = start()
    state = run.state()
    with use_rules(run.context.rules):
        sums = run.quickly(make_eval_step(run.context.objective))(
            state.weights, state.reference, batch
        )
    metrics = run.context.objective.eval_metrics({name: float(x) for name, x in sums.items()})
    with torch.no_grad():
        expected = torch_losses(student, teacher, batch)["hard_loss"].item()
    assert metrics == {
        "loss": pytest.approx(expected, rel=1e-5),
        "perplexity": pytest.approx(math.exp(expected), rel=1e-5),
    }


def test_coefficients_follow_their_schedules(start):
    run = start(
        "distill_alpha=1.0", "distill_alpha_end=0.5", "distill_alpha_schedule=linear",
        "distill_temperature=4.0", "distill_temperature_end=1.0",
        "distill_temperature_schedule=cosine", "learning_rate_schedule_steps=8",
    )  # fmt: skip
    coefficients = [loss_coefficients(run.config, step) for step in (0, 2, 8, 9)]
    assert [float(x["distill_alpha"]) for x in coefficients] == pytest.approx([1, 0.875, 0.5, 0.5])
    quarter = 1 + 3 * (1 + math.cos(math.pi / 4)) / 2
    assert [float(x["distill_temperature"]) for x in coefficients] == pytest.approx(
        [4, quarter, 1, 1]
    )


@pytest.mark.slow
def test_estimate_counts_the_teacher(start, models):
    config = start("dtype=bfloat16").config
    result = estimate_memory(config, find_target("cpu"), compiling=False)
    norms = sum(p.numel() for name, p in models[2].named_parameters() if "norm" in name)
    assert result.reference.device == 2 * models[2].num_parameters() + 2 * norms


def test_teacher_has_the_keys_of_the_run_and_its_own(start):
    run = start(
        "teacher_overrides.scan_layers=true",
        "remat_policy=minimal",
        "student_overrides.remat_policy=full",
    )
    teacher = run.context.objective.teacher_config
    assert (run.config.num_decoder_layers, teacher.num_decoder_layers) == (1, 2)
    assert teacher.max_target_length == LENGTH
    assert (run.config.scan_layers, teacher.scan_layers) == (False, True)
    assert (run.config.remat_policy, teacher.remat_policy) == ("full", "minimal")


def test_models_of_different_vocabularies_are_refused(start, tmp_path):
    save_llama(tmp_path / "other", layers=1, embed_dim=16, seed=0, vocab_size=VOCABULARY + 1)
    with pytest.raises(ConfigError, match=f"vocab_size={VOCABULARY + 1} and the student"):
        start(f"teacher_overrides.load_parameters_path={tmp_path / 'other'}")


def test_different_tokenizers_of_the_same_size_are_refused(start, tmp_path):
    for name, words in (("one", "abc"), ("other", "acb")):
        vocabulary = {word: index for index, word in enumerate(words)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
        tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="token 1 is 'c' in .*other and 'b' in .*one"):
        start(
            f"tokenizer_path={tmp_path / 'one'}",
            f"teacher_overrides.tokenizer_path={tmp_path / 'other'}",
        )


def test_teacher_without_weights_is_refused(start):
    run = start("teacher_overrides.load_parameters_path=", "teacher_overrides.vocab_size=41")
    with pytest.raises(ConfigError, match="set teacher_overrides.load_parameters_path"):
        run.state()


@pytest.mark.slow
def test_stopped_run_resumes_bit_for_bit_and_refuses_another_teacher(models, tmp_path):
    folders = models[0]

    def train(name, teacher, steps):
        return tune.distill(
            folders["student"],
            teacher,
            base_output_directory=str(tmp_path),
            run_name=name,
            steps=steps,
            learning_rate_schedule_steps=4,
            dataset_type="synthetic",
            packing=False,
            max_target_length=LENGTH,
            per_device_batch_size=2,
            distill_alpha_end=0.0,
            distill_alpha_schedule="linear",
            async_checkpointing=False,
        )

    once = train("once", folders["teacher"], 4)
    train("twice", folders["teacher"], 2)
    twice = train("twice", folders["teacher"], 4)
    assert [row["step"] for row in twice.metrics] == [2, 3]
    assert [row["distill_alpha"] for row in twice.metrics] == [0.25, 0.125]
    assert [row["loss"] for row in twice.metrics] == [row["loss"] for row in once.metrics[2:]]
    weights = (run.result.state.weights for run in (once, twice))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *weights))
    other = tmp_path / "other"
    save_llama(other, layers=2, embed_dim=24, seed=9)
    with pytest.raises(ConfigError, match="than those of load_parameters_path=.*other"):
        train("twice", other, 5)
