"""A tiny Llama folder with a byte-level BPE and a chat template, and lm-eval's models of it."""

import json

import pytest

from maxtext import LLM
from tests.tokenizers.tiny import CORPUS, write_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
EXACT = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
}
LENGTH = 96
CHOICES = [
    {"question": f"{a} liters of tea and {b} is ", "choices": [f"{a + b + d}" for d in range(3)]}
    for a in (3, 40)
    for b in (5, 6)
] + [{"question": "", "choices": ["the fox", " jumps over", "日本"]}]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "rows": CHOICES,
    },
    "few_shot": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "num_fewshot": 2,
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}],
        "rows": CHOICES,
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{head}}",
        "doc_to_target": " {{tail}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        # the last one is longer than the model's context
        "rows": [
            {"head": text.rpartition(" ")[0], "tail": text.rpartition(" ")[2]}
            for text in ("the quick brown fox", "seven wizards", " ".join(CORPUS[:2]))
        ],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        "rows": [{"text": text} for text in ("fox", "<s>the lazy dog", CORPUS[0], CORPUS[7] * 3)],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        "rows": [{"question": text} for text in ("Say fox.", "tea and", CORPUS[1], "liters\n")],
    },
}


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return write_bpe(path)


@pytest.fixture(scope="session")
def bpe_llm(bpe_folder):
    return LLM.load(bpe_folder, max_target_length=LENGTH, **EXACT)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """YAML files of tasks, each with its JSON lines."""
    import yaml

    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in task["rows"]))
        settings = {key: value for key, value in task.items() if key != "rows"} | {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="session")
def lm_eval_offline(tmp_path_factory):
    """lm-eval, with a cache of datasets of its own and no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("TQDM_DISABLE", "1")
        lm_eval = pytest.importorskip("lm_eval")
        datasets = pytest.importorskip("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield lm_eval


@pytest.fixture(scope="session")
def hf_lm(bpe_folder, lm_eval_offline):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(bpe_folder), dtype="float32", device="cpu", batch_size=1, max_length=LENGTH)
