"""Learn-to-init: attention weights of a student as maps of its teacher's; torch is the oracle."""

import jax
import numpy as np
import pytest
import torch
import transformers

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights
from maxtext.common.errors import ConfigError
from maxtext.inference.llm import LLM
from maxtext.optimizers import parameter_paths
from maxtext.trainers import tune
from maxtext.trainers.checkpointing.init_state import initial_weights
from tests.support.distillation import (
    PROBE,
    RATE,
    Run,
    save_llama,
    torch_losses,
)
from tests.trainers.conftest import LENGTH

EMBED_DIM, HEADS, HEAD_DIM = 16, 2, 12  # of the student; the teacher has 4 heads of 4
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}


def save_student(folder, layers, seed=0):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=41, hidden_size=EMBED_DIM, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD_DIM,
            max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return folder, save_llama(folder, layers=2, embed_dim=EMBED_DIM, seed=1)


@pytest.fixture(scope="module")
def folders(teacher, tmp_path_factory):
    student = save_student(tmp_path_factory.mktemp("student"), layers=2)
    return {"student": student, "teacher": teacher[0]}


def make_run(folders, *overrides, quickly=None):
    return Run(folders, "learn_to_init_mode=true", *overrides, quickly=quickly)


def parameters(run, weights):
    """All trained parameters by name."""
    infos = model_param_infos(run.context.template, run.config)
    return dict(ModelWeights(weights, infos))


def teacher_weight(teacher, layer, name):
    """As ours: [E, heads, head_dim], or [heads, head_dim, E] of `out`."""
    weight = getattr(teacher.model.layers[layer].self_attn, PROJECTIONS[name]).weight.detach()
    return weight.T.reshape(4 if name == "out" else EMBED_DIM, -1, 4 if name != "out" else 16)


def mapped_weight(teacher, layer, name, factors):
    """K as a weight of torch, [outputs, inputs], with gradients to the factors."""
    c, path = teacher_weight(teacher, layer, name), f"layers/{layer}/attention/{name}"
    if f"{path}/lti_w" in factors:
        equation = "xyb,xyuv->uvb" if name == "out" else "bxy,xyuv->buv"
        k = torch.einsum(equation, c, factors[f"{path}/lti_w"])
    else:
        equation = "xyb,xu,yv->uvb" if name == "out" else "bxy,xu,yv->buv"
        k = torch.einsum(equation, c, factors[f"{path}/lti_a"], factors[f"{path}/lti_b"])
    return k.reshape(-1, EMBED_DIM).T if name == "out" else k.reshape(EMBED_DIM, -1).T


def torch_update(folders, teacher, factors, batch):
    """The loss of a step, and the logits of the student after it."""
    student = transformers.LlamaForCausalLM.from_pretrained(folders["student"])
    factors = {name: torch.tensor(array).requires_grad_() for name, array in factors.items()}

    def insert():
        for layer, block in enumerate(student.model.layers):
            for name, attribute in PROJECTIONS.items():
                module = getattr(block.self_attn, attribute)
                module._parameters.pop("weight", None)
                module.weight = mapped_weight(teacher, layer, name, factors)

    insert()
    losses = torch_losses(student, teacher, batch)
    loss = 0.7 * 4 * losses["kl"] + 0.3 * losses["hard_loss"]
    loss.backward()
    torch.optim.SGD([*student.parameters(), *factors.values()], lr=RATE).step()
    with torch.no_grad():
        insert()
        return loss.item(), student(torch.tensor(PROBE)).logits.numpy()


@pytest.mark.parametrize(
    "keys",
    [
        ("scan_layers=false",),
        pytest.param(
            ("scan_layers=true", "lti_use_general_linear_map=true"), marks=pytest.mark.slow
        ),
    ],
)
def test_update_equals_torch(folders, teacher, packed, quickly, keys):
    run = make_run(folders, *keys, quickly=quickly)
    state = run.state()
    factors = {
        name: value for name, value in parameters(run, state.weights).items() if "/lti_" in name
    }
    assert len(factors) == 2 * 4 * (1 if "lti_use_general_linear_map=true" in keys else 2)
    loss, logits = torch_update(folders, teacher[1], factors, packed)
    state, metrics = run.step(state, packed)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    model = run.context.objective.model_template.bind(run.context.model_weights(state))
    positions = np.broadcast_to(np.arange(PROBE.shape[1]), PROBE.shape)
    np.testing.assert_allclose(model(PROBE, positions), logits, atol=5e-5)


def test_factors_have_the_variance_of_their_fan_in(folders):
    """So that the weights of the student have the variance of the teacher's."""
    run = make_run(folders, "lti_use_general_linear_map=true")
    weights = parameters(run, initial_weights(run.context))
    values = np.concatenate(
        [array.ravel() for name, array in weights.items() if name.endswith("query/lti_w")]
    )
    assert values.size == 2 * 16 * HEADS * HEAD_DIM  # 768
    assert np.std(values) == pytest.approx(1 / 4, rel=0.1)  # fan-in 16
    assert np.abs(np.mean(values)) < 0.04


def test_layers_of_the_teacher_are_chosen_by_the_copy_map(teacher, tmp_path):
    folders = {"student": save_student(tmp_path / "one", layers=1), "teacher": teacher[0]}
    run = make_run(
        folders,
        r"distill_weights_copy_map={layers/1/attention/(.*): layers/0/attention/\1, "
        "embedder/embedding: embedder/embedding}",
        "scan_layers=true",
    )
    state = run.state()
    embedding = parameters(run, state.weights)["embedder/embedding"]
    np.testing.assert_array_equal(embedding, teacher[1].model.embed_tokens.weight.detach())
    factors = {
        name: torch.tensor(value)
        for name, value in parameters(run, state.weights).items()
        if "/lti_" in name
    }
    moved = {name.replace("layers/0", "layers/1"): value for name, value in factors.items()}
    infos = model_param_infos(run.context.objective.model_template, run.config)
    weights = ModelWeights(run.context.model_weights(state), infos)
    for name in PROJECTIONS:
        expected = mapped_weight(teacher[1], 1, name, moved).T
        actual = weights.read(f"layers/0/attention/{name}/weight")
        np.testing.assert_allclose(actual.reshape(expected.shape), expected, atol=1e-5)


def test_only_factors_are_trained_if_patterns_say_so(folders):
    run = make_run(folders, "student_params_to_update=[attention/query/lti_]", "opt_type=adamw")
    paths = jax.tree.leaves(parameter_paths(run.context.template.weights))
    is_trained = jax.tree.leaves(run.context.trained)
    trained = {path for path, on in zip(paths, is_trained, strict=True) if on}
    query = "layers/0/blocks/0/{}/attention/query/lti_{}"
    assert trained == {query.format(layer, factor) for layer in (0, 1) for factor in "ab"}


def test_models_that_cannot_be_mapped_are_refused(folders, teacher, tmp_path):
    deeper = {"student": save_student(tmp_path / "deeper", layers=3), "teacher": teacher[0]}
    with pytest.raises(ConfigError, match="no 'layers/2/attention/.*/weight': map another"):
        make_run(deeper)
    save_llama(tmp_path / "wide", layers=2, embed_dim=24, seed=1)
    with pytest.raises(ConfigError, match="both models need the same emb_dim"):
        make_run({"student": folders["student"], "teacher": tmp_path / "wide"})
    with pytest.raises(ConfigError, match="no layer of the student has all of them"):
        make_run(folders, "student_overrides.fused_qkv=true")


@pytest.mark.slow
def test_finished_run_leaves_an_ordinary_model(folders, tmp_path, light_compiler):
    def train(steps):
        return tune.distill(
            folders["student"],
            folders["teacher"],
            base_output_directory=str(tmp_path),
            run_name="run",
            learn_to_init_mode=True,
            steps=steps,
            learning_rate_schedule_steps=4,
            dataset_type="synthetic",
            packing=False,
            max_target_length=LENGTH,
            per_device_batch_size=2,
            dtype="float32",
            async_checkpointing=False,
        )

    train(2)
    run = train(4)  # resumed
    assert [row["step"] for row in run.metrics] == [2, 3]
    loaded = LLM.load(run.folder / "student", dtype="float32")
    np.testing.assert_array_equal(loaded.logits(PROBE), run.model.logits(PROBE))
    run.model.save_hf(tmp_path / "hf")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = model(torch.tensor(PROBE)).logits
    np.testing.assert_allclose(loaded.logits(PROBE), expected, atol=1e-3)
