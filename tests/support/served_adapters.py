"""Models with PEFT adapters."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
SETTINGS = dict(
    dtype="float32", weight_dtype="float32", matmul_precision="highest", attention="dot_product"
)
KINDS = {
    "plain": dict(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
    "dora": dict(r=2, target_modules=["k_proj", "o_proj"], use_dora=True),
    "head": dict(r=3, target_modules=["up_proj"], modules_to_save=["lm_head"], use_rslora=True),
}
TOKENS = 5


def adapted(model, options, seed):
    """The model with a random adapter."""
    lora = peft.LoraConfig(lora_alpha=8, task_type="CAUSAL_LM", **options)
    wrapped = peft.get_peft_model(copy.deepcopy(model), lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            elif "magnitude" in name or "modules_to_save" in name:
                weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=generator))
    return wrapped.eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()


def greedy(model, ids, count=TOKENS):
    tokens = np.asarray(ids)
    for _ in range(count):
        tokens = np.concatenate([tokens, logits_of(model, tokens)[:, -1:].argmax(-1)], axis=1)
    return tokens[:, np.shape(ids)[1] :]
