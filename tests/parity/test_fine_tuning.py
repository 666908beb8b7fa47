"""Fine-tuning equals a loop in torch over transformers' model (and PEFT's adapters): losses of each
step and the logits afterwards."""

import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext import tune
from maxtext.checkpoint.open import open_checkpoint
from maxtext.common.errors import ConfigError
from maxtext.configs.sources import HERE, from_python
from maxtext.layers.lora import split_adapter
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.export import trained_llm
from maxtext.trainers.checkpointing.init_state import initial_weights
from maxtext.trainers.configuration import load_run
from tests.tokenizers.tiny import write_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("light_compiler")

VOCABULARY, LENGTH, RATE, BETA = 400, 48, 3e-3, 0.1
EXACT = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "per_device_batch_size": 2,
    "max_target_length": LENGTH,
    "enable_data_shuffling": False,
    "packing": False,
    "learning_rate": RATE,
    "learning_rate_final_fraction": 1.0,
    "warmup_steps_fraction": 0.0,
    "adam_b2": 0.95,
    "gradient_clipping_threshold": 0.0,
}
CHATS = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
    for a, b in [("hi", "yo"), ("two and two", "four"), ("go", "no"), ("and then", "we slept")]
]
PAIRS = [
    {
        "prompt": chat["messages"][:1],
        "chosen": chat["messages"][1:],
        "rejected": [{"role": "assistant", "content": "never"}],
    }
    for chat in CHATS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama of two layers with a chat tokenizer."""
    path = write_bpe(tmp_path_factory.mktemp("base"), VOCABULARY)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:  # larger than the usual start, so that differences show
                weight.copy_(torch.randn_like(weight) / math.sqrt(weight.shape[1]))
    model.save_pretrained(path)
    return path


def torch_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def token_logps(model, ids):
    """Log-probabilities of ids[1:]."""
    ids = torch.tensor([ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def train(model, losses, weight_decay=0.0):
    """The value of each loss, a function of the model, before its AdamW update. As in transformers'
    Trainer, norms are not decayed."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1]},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, RATE, (0.9, 0.95), 1e-8, weight_decay=weight_decay)
    values = []
    for loss in losses:
        value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(value.detach()))
    return values


def sft_loss(folder, rows):
    encoded = [tune.encode(row, tokenizer=folder) for row in rows]

    def loss(model):
        logps = torch.cat([token_logps(model, row["ids"]) for row in encoded])
        mask = torch.tensor([learned for row in encoded for learned in row["mask"][1:]])
        return -(logps * mask).sum() / mask.sum()

    return loss


def dpo_loss(folder, rows, reference):
    def sums(model, pair, side):
        logps = token_logps(model, pair["prompt"] + pair[side])
        return logps[len(pair["prompt"]) - 1 :].sum()

    pairs = [tune.encode_pair(row, tokenizer=folder) for row in rows]
    with torch.no_grad():
        base = [[sums(reference, pair, side) for side in ("chosen", "rejected")] for pair in pairs]

    def loss(model):
        margins = [
            (sums(model, pair, "chosen") - chosen) - (sums(model, pair, "rejected") - rejected)
            for pair, (chosen, rejected) in zip(pairs, base, strict=True)
        ]
        return -torch.nn.functional.logsigmoid(BETA * torch.stack(margins)).mean()

    return loss


PROBE = np.random.default_rng(0).integers(0, VOCABULARY, (1, 9))


def probe(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(PROBE), use_cache=False).logits.numpy()


def losses_of(run):
    return [metrics["loss"] for metrics in run.metrics]


@pytest.mark.slow
def test_sft_equals_torch(folder):
    model = torch_model(folder)
    expected = train(model, [sft_loss(folder, CHATS[:2]), sft_loss(folder, CHATS[2:])])
    run = tune.sft(folder, CHATS, steps=2, **EXACT)
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    np.testing.assert_allclose(run.model.logits(PROBE), probe(model), atol=1e-4)


@pytest.mark.slow
def test_weight_decay_leaves_norms_out(folder):
    model, decay = torch_model(folder), 2.0
    expected = train(model, [sft_loss(folder, CHATS[:2]), sft_loss(folder, CHATS[2:])], decay)
    run = tune.sft(folder, CHATS, steps=2, adam_weight_decay=decay, **EXACT)
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    np.testing.assert_allclose(run.model.logits(PROBE), probe(model), atol=1e-4)


@pytest.mark.slow
def test_packed_rows_have_the_loss_of_the_same_rows(folder):
    expected = train(torch_model(folder), [sft_loss(folder, CHATS)])
    keys = EXACT | {"packing": True, "per_device_batch_size": 1, "max_target_length": 128}
    assert losses_of(tune.sft(folder, CHATS, steps=1, **keys)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_dpo_equals_torch(folder):
    model, reference = torch_model(folder), torch_model(folder)
    batches = [PAIRS[:2], PAIRS[2:]]
    expected = train(model, [dpo_loss(folder, rows, reference) for rows in batches])
    run = tune.dpo(folder, PAIRS, steps=2, dpo_beta=BETA, **EXACT)
    assert expected[0] == pytest.approx(math.log(2))
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    np.testing.assert_allclose(run.model.logits(PROBE), probe(model), atol=1e-4)


@pytest.fixture(scope="module")
def peft_adapter(folder, tmp_path_factory):
    """A PEFT adapter with random values, and a function that loads it for training."""
    peft = pytest.importorskip("peft")
    path = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(torch_model(folder), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return path, lambda: peft.PeftModel.from_pretrained(
        torch_model(folder), path, is_trainable=True
    )


@pytest.mark.slow
def test_adapters_train_as_with_peft(folder, peft_adapter):
    path, load = peft_adapter
    model = load()
    expected = train(model, [sft_loss(folder, CHATS[:2]), sft_loss(folder, CHATS[2:])])
    run = tune.sft(folder, CHATS, steps=2, lora_restore_path=str(path), **EXACT)
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    np.testing.assert_allclose(run.model.logits(PROBE), probe(model), atol=1e-4)


@pytest.mark.slow
def test_modules_that_are_saved_in_full_train_as_with_peft(folder, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    )
    start = peft.get_peft_model(torch_model(folder), config)
    with torch.no_grad():
        start.base_model.model.lm_head.modules_to_save.default.weight.mul_(1.5)
    start.save_pretrained(path := tmp_path / "start")
    model = peft.PeftModel.from_pretrained(torch_model(folder), path, is_trainable=True)
    expected = train(model, [sft_loss(folder, CHATS[:2]), sft_loss(folder, CHATS[2:])])
    run = tune.sft(folder, CHATS, steps=2, lora_restore_path=str(path), **EXACT)
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    run.model.save_adapter(tmp_path / "end")
    written = safetensors.numpy.load_file(tmp_path / "end" / "adapter_model.safetensors")
    for name, weight in peft.get_peft_model_state_dict(model).items():
        np.testing.assert_allclose(written[name], weight.detach().numpy(), atol=1e-5)


@pytest.mark.slow
def test_layers_of_one_module_share_a_factor(tmp_path):
    """query, key and value are one module of Phi-3, as are gate and up: their adapters have one A,
    which is trained with the sum of their gradients."""
    peft = pytest.importorskip("peft")
    base = write_bpe(tmp_path / "base", VOCABULARY)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY, pad_token_id=0, num_key_value_heads=2, **sizes
    )
    transformers.Phi3ForCausalLM(config).save_pretrained(base)
    targets = ["qkv_proj", "gate_up_proj"]
    keys = EXACT | {"lora_rank": 4, "lora_alpha": 8, "lora_target_modules": targets}
    tune.sft(base, CHATS, steps=1, **keys).model.save_adapter(start := tmp_path / "start")
    settings = json.loads((start / "adapter_config.json").read_text())
    assert settings["r"] == 4
    assert not settings["rank_pattern"]
    model = peft.PeftModel.from_pretrained(torch_model(base), start, is_trainable=True)
    expected = train(model, [sft_loss(base, CHATS[:2]), sft_loss(base, CHATS[2:])])
    run = tune.sft(base, CHATS, steps=2, lora_restore_path=str(start), **EXACT)
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-5)
    run.model.save_adapter(tmp_path / "end")
    written = safetensors.numpy.load_file(tmp_path / "end" / "adapter_model.safetensors")
    for name, weight in peft.get_peft_model_state_dict(model).items():
        np.testing.assert_allclose(written[name], weight.numpy(), atol=1e-5)


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_its_start(folder, peft_adapter):
    path, load = peft_adapter
    model, reference = load(), load()
    batches = [PAIRS[:2], PAIRS[2:]]
    expected = train(model, [dpo_loss(folder, rows, reference) for rows in batches])
    keys = EXACT | {"lora_restore_path": str(path), "dpo_beta": BETA}
    assert losses_of(tune.dpo(folder, PAIRS, steps=2, **keys)) == pytest.approx(expected, rel=1e-5)


# tests/trainers/test_fine_tuning_invariants.py resumes the adapters of a preference run by default.
@pytest.mark.exhaustive
def test_resumed_adapters_equal_an_uninterrupted_run(folder, tmp_path):
    keys = EXACT | {
        "base_output_directory": str(tmp_path),
        "checkpoint_period": 1,
        "learning_rate_schedule_steps": 2,
        "lora_rank": 4,
        "num_epoch": 2,
    }
    whole = tune.sft(folder, CHATS, steps=2, run_name="whole", **keys)
    tune.sft(folder, CHATS, steps=1, run_name="resumed", **keys)
    resumed = tune.sft(folder, CHATS, steps=2, run_name="resumed", **keys)
    assert len(resumed.metrics) == 1
    np.testing.assert_array_equal(whole.model.logits(PROBE), resumed.model.logits(PROBE))
    settings = json.loads((tmp_path / "resumed" / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4
    other = torch_model(folder)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    write_bpe(tmp_path / "other", VOCABULARY)
    with pytest.raises(ConfigError, match="name the folder that the run began with"):
        tune.sft(tmp_path / "other", CHATS, steps=3, run_name="resumed", **keys)


def test_frozen_base_keeps_the_dtype_of_its_folder(folder, tmp_path):
    """Adapters train in float32 over bfloat16; a merged export is bfloat16 again. Trained weights
    have float32 copies."""
    model = torch_model(folder).to(torch.bfloat16)
    model.save_pretrained(base := tmp_path / "base")
    for file in folder.glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())
    checkpoint = open_checkpoint(base)
    keys = {name: value for name, value in EXACT.items() if name != "weight_dtype"}

    def configure(**more):
        layer = from_python({"load_parameters_path": str(base), **keys, **more})
        return load_run(HERE / "sft.yml", layer, checkpoint)

    assert configure().weight_dtype.value == "float32"
    assert configure(lora_rank=2, weight_dtype="float32").weight_dtype.value == "float32"
    context = build_run_context(configure(lora_rank=2))
    weights = initial_weights(context, checkpoint)
    frozen, adapter = split_adapter(weights)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(adapter)} == {"float32"}
    llm = trained_llm(context, context.state_from_weights(weights), checkpoint)
    llm.merge("adapter").save_hf(tmp_path / "merged")
    merged = open_checkpoint(tmp_path / "merged").source.tensors
    assert {str(tensor.dtype) for tensor in merged.values()} == {"bfloat16"}
