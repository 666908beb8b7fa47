"""Small Hugging Face folders of several families, written without transformers: zeros for weights,
and a tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxtext.checkpoint.open import model_param_infos, save_hf_folder
from maxtext.checkpoint.tensors import DTYPES, TensorInfo
from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template
from tests.tokenizers.tiny import write_bpe

TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 2,
    "vocab_size": 400,
    "max_target_length": 32,
    "scan_layers": "false",
    "override_model_config": "true",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 12}
LATENT = {
    "base_num_kv_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_num_dense_layers": 1,
    "n_routing_groups": 2,
    "topk_routing_group": 1,
}
DELTA = {
    "gdn_key_head_dim": 8,
    "gdn_value_head_dim": 8,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "base_num_decoder_layers": 4,
}
FAMILIES = {
    "llama3.1-8b": {},
    "llama4-17b-16e": EXPERTS
    | {"base_num_decoder_layers": 4, "num_experts_per_tok": 1, "chunk_attn_window_size": 8},
    "mixtral-8x7b": EXPERTS,
    "gemma3-4b": {"base_num_decoder_layers": 6, "sliding_window_size": 8},
    "gemma4-26b": EXPERTS
    | {
        "base_num_decoder_layers": 6,
        "sliding_window_size": 8,
        "global_head_dim": 8,
        "global_num_kv_heads": 1,
    },
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": EXPERTS,
    "qwen3-next-80b-a3b": EXPERTS | DELTA,
    "deepseek3-671b": EXPERTS | LATENT,
    "gpt-oss-20b": EXPERTS | {"sliding_window_size": 8},
    "olmo3-7b": {"base_num_decoder_layers": 4, "sliding_window_size": 8},
}
ALL_EXPERTS = (
    "gpt-oss-20b",
    "llama4-17b-16e",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen3-next-80b-a3b",
)
UNUSED = {"deepseek3-671b": "head_dim", **dict.fromkeys(ALL_EXPERTS, "base_mlp_dim")}


class Zeros:
    """A stream of zero weights."""

    title = "zeros"

    def __init__(self, tensors: dict[str, TensorInfo]):
        self.tensors = tensors

    def read(self, name: str) -> np.ndarray:
        return np.zeros(self.tensors[name].shape, self.tensors[name].dtype)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


def write_hf_folder(folder: Path, model_name: str, shard_bytes: int = 20_000) -> Path:
    """Weights in several files, config.json, and the files of a tokenizer."""
    keys = TINY | FAMILIES[model_name]
    keys.pop(UNUSED.get(model_name, ""), None)
    settings = [f"model_name={model_name}", *(f"{key}={value}" for key, value in keys.items())]
    config = load(None, settings, environ={}, devices=Devices(1))
    param_infos = model_param_infos(make_template(config), config)
    weights = Zeros(
        {name: TensorInfo(DTYPES["BF16"], info.shape) for name, info in param_infos.items()}
    )
    save_hf_folder(folder, config, param_infos, weights, shard_bytes=shard_bytes)
    write_bpe(folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 3], "temperature": 0.6, "do_sample": true}'
    )
    return folder
