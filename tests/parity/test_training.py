"""Gradients of every weight equal torch's: dense models, experts with latent attention, Gated
DeltaNets. And a student whose teacher is itself has nothing to learn.

The gradients that torch finds are written into a Hugging Face folder in place of the weights, and
read by our tables.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import zoo

from maxtext import LLM
from maxtext.checkpoint.open import open_checkpoint
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state, with_reference
from maxtext.trainers.compilation.compile import compile_train_step
from maxtext.trainers.model_losses import language_model_losses

LENGTH = 24  # tokens that are learned from
FAST = {"llama tied with biases", "mixtral sliding", "qwen3-next one to one"}
CASES = [
    *FAST,
    "gemma2 tight caps",
    "gpt2",
    "deepseek3",
    "gpt-oss",
    "llama4 listed",
    "qwen3.5 one to one",
]


def batch_of(ids):
    """Each token's target is the next."""
    inputs, targets = ids[:, :LENGTH], ids[:, 1 : LENGTH + 1]
    positions, ones = np.broadcast_to(np.arange(LENGTH), inputs.shape), np.ones_like(inputs)
    fields = {"inputs": inputs, "inputs_position": positions, "inputs_segmentation": ones,
              "targets": targets,
              "targets_position": positions, "targets_segmentation": ones}  # fmt: skip
    return {name: jnp.asarray(field, jnp.int32) for name, field in fields.items()}


def write_hf_gradients(example, folder):
    """Write the gradients of the mean cross-entropy as a folder of tensors."""
    model = zoo.hf_model(example.folder).train(False)
    inputs, targets = (torch.tensor(example.ids[:, start : start + LENGTH]) for start in (0, 1))
    logits = model(input_ids=inputs, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    model.save_pretrained(folder)


@pytest.mark.representative(
    "qwen3-next one to one",
    "gpt-oss",
    "deepseek3",
    "gemma2 tight caps",
    "llama tied with biases",
    "gpt2",
)
@pytest.mark.parametrize("name", zoo.parameters(sorted(CASES), FAST))
def test_gradients(name, specimen, model, tmp_path):
    example, llm = specimen(name), model(name)
    write_hf_gradients(example, tmp_path / "gradients")
    expected = LLM.load(tmp_path / "gradients", **zoo.SETTINGS).weights
    batch = batch_of(example.ids)

    def loss(weights):
        losses = language_model_losses(llm.config, llm.template, weights, batch, None)
        return losses.sums["lm_loss"] / batch["inputs"].size

    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(loss))(llm.weights)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(found))
    assert scale > 1e-3
    trained = jax.tree.leaves(llm.template.trained)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), trained, strict=True)
    for (path, leaf), other, learned in pairs:
        if learned:
            np.testing.assert_allclose(
                leaf, other, atol=2e-5 * scale, rtol=1e-3, err_msg=jax.tree_util.keystr(path)
            )
        else:
            assert not np.any(leaf), path  # what is set in another way has no gradient


# With norms, biases of routers, decays and sinks that bfloat16 would round.
SENSITIVE = ["llama tied with biases", "gpt-oss", "deepseek3", "qwen3-next one to one"]


@pytest.mark.representative("gpt-oss-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SENSITIVE)
def test_kl_from_a_teacher_that_is_the_student_is_0(name, dtype, specimen):
    example = specimen(name)
    keys = [
        f"load_parameters_path={example.folder}",
        f"teacher_overrides.load_parameters_path={example.folder}",
        *(f"{key}={value}" for key, value in zoo.SETTINGS.items() if "dtype" not in key),
        f"dtype={dtype}", f"max_target_length={LENGTH}", "per_device_batch_size=1", "steps=1",
        "dataset_type=grain", "enable_tensorboard=false", "remat_policy=none",
    ]  # fmt: skip
    layer = from_overrides(keys)
    model_layer = open_checkpoint(example.folder).model_layer
    context = build_run_context(
        load(None, layer, environ={}, devices=Devices(1), model=model_layer)
    )
    state = with_reference(context, initial_state(context), 0, None)
    batch = {key: field[:1] for key, field in batch_of(example.ids).items()}
    _, metrics = compile_train_step(context, 1)(state, batch, context.key)
    assert abs(float(metrics["kl_temperature_1"])) < 1e-7  # the rounding of float32
    assert float(metrics["teacher_loss"]) > 1
