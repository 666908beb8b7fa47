"""Fine-tuning on one GPU against TRL and PEFT, both with random weights and random tokens.

    python benchmarks/finetune.py [--cases sft,lora,qlora,qlora70b,dpo,adapters] [--steps 30]

Each side runs in its own process. Ours are the commands `maxtext sft` and `maxtext dpo` with the
overrides below, on rows of words that are one token each, packed with masks between documents. The
peer is TRL's SFTTrainer or DPOTrainer: bfloat16, SDPA, fused AdamW, gradient checkpointing as TRL
sets it, torch.compile where it works. Its rows have the same number of tokens, but one document
each, so that SDPA needs no masks.

- sft: all weights of the `default` shape (1.1B), 8 x 2048 tokens.
- lora: rank 16 on all linear layers of an 8B shape, 4 x 4096 tokens, with full rematerialization.
- qlora: the same over a base in nf4, 1 x 4096 tokens with full rematerialization; the peer is its
  own LoRA over a bfloat16 base at 1 x 4096.
- qlora70b: a 70B shape in nf4 on one GPU; without a peer.
- dpo: LoRA of the 8B shape, 4 pairs of 1024 tokens, reference by the model without its adapter.
- adapters: 32 sequences decode with 8 adapters of rank 16, against the same model without adapters.

Tokens per second are of the median step after the first ten; memory is the largest amount
allocated. Prints one JSON line.
"""

import argparse
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

WARMUP_STEPS = 10
NUM_WORDS = 4000  # of the tokenizer; a model's vocabulary is larger
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES = {
    "1b": dict(layers=16, embed=2048, heads=16, kv_heads=16, mlp=7168, vocabulary=32000),
    "8b": dict(layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336, vocabulary=128256),
    "70b": dict(layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672, vocabulary=128256),
    "tiny": dict(layers=2, embed=128, heads=2, kv_heads=1, mlp=256, vocabulary=4096),
}  # fmt: skip
HEAD_DIM = {"tiny": 64}
COMMON = [
    "decoder_block=llama2",
    "dataset_type=grain",
    "grain_file_type=jsonl",
    "enable_checkpointing=false",
    "enable_tensorboard=false",
    "run_name=finetune",
    "dtype=bfloat16",
    "learning_rate=1e-5",
]
ADAPTERS = [f"lora_rank={RANK}", "weight_dtype=bfloat16"]
CASES: dict[str, dict[str, Any]] = {
    "sft": dict(shape="1b", rows=8, length=2048, keys=["remat_policy=none"]),
    "lora": dict(
        shape="8b", rows=4, length=4096, lora=True,
        keys=[*ADAPTERS, "remat_policy=full", "num_vocab_tiling=8", "max_segments_per_seq=8"],
    ),
    "qlora": dict(
        shape="8b", rows=1, length=4096, lora=True,
        keys=[*ADAPTERS, "lora_weight_qtype=nf4", "remat_policy=full", "num_vocab_tiling=8"],
    ),
    "qlora70b": dict(
        shape="70b", rows=1, length=4096, lora=True, peer=False, scan=True,
        keys=[*ADAPTERS, "lora_weight_qtype=nf4", "remat_policy=full", "num_vocab_tiling=8"],
    ),
    "dpo": dict(
        shape="8b", rows=4, length=1024, lora=True, pairs=True,
        keys=[*ADAPTERS, "remat_policy=minimal_with_context"],
    ),
    "tiny": dict(shape="tiny", rows=2, length=64, lora=True, keys=[f"lora_rank={RANK}"]),
    "tiny_sft": dict(shape="tiny", rows=2, length=64, keys=[]),
    "tiny_dpo": dict(
        shape="tiny", rows=2, length=64, lora=True, pairs=True, keys=[f"lora_rank={RANK}"]
    ),
}  # fmt: skip


def shape_keys(shape: str) -> dict[str, int]:
    sizes = SHAPES[shape]
    return {
        "base_emb_dim": sizes["embed"],
        "base_num_decoder_layers": sizes["layers"],
        "head_dim": HEAD_DIM.get(shape, 128),
        "base_num_query_heads": sizes["heads"],
        "base_num_kv_heads": sizes["kv_heads"],
        "base_mlp_dim": sizes["mlp"],
        "vocab_size": sizes["vocabulary"],
    }


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words, w0, w1 …, so that a row has a known number of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<pad>", "<s>", "</s>", *(f"w{number}" for number in range(NUM_WORDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_rows(path: Path, case: dict[str, Any], steps: int) -> None:
    """Prompts and completions for all steps: documents of a sixteenth to a half of a packed row, or
    pairs that fill a row each."""
    rng, length = random.Random(0), case["length"]

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(count))

    tokens = 0
    with path.open("w") as file:
        while tokens < 1.2 * steps * case["rows"] * length:
            if case.get("pairs"):
                prompt, completion = length // 2, length // 2 - 2
                names = ("chosen", "rejected")
            else:
                total = rng.randrange(length // 16, length // 2)
                prompt, completion = total // 4, total - total // 4
                names = ("completion",)
            row = {"prompt": words(prompt)} | {name: words(completion) for name in names}
            file.write(json.dumps(row) + "\n")
            tokens += prompt + completion


def run_ours(case: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    write_rows(folder / "rows.jsonl", case, steps)
    metrics = folder / "metrics.jsonl"
    verb = "dpo" if case.get("pairs") else "sft"
    keys = [
        *COMMON,
        *(f"{key}={value}" for key, value in shape_keys(case["shape"]).items()),
        *case["keys"],
        f"per_device_batch_size={case['rows']}",
        f"scan_layers={case.get('scan', False)}",
        f"max_target_length={case['length']}",
        f"tokenizer_path={tokenizer}",
        f"grain_train_files={folder / 'rows.jsonl'}",
        f"base_output_directory={folder}",
        f"metrics_file={metrics}",
        f"steps={steps}",
    ]
    command = [sys.executable, "-m", "maxtext", verb, *keys]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [
        record["step_time_seconds"]
        for record in records
        if record.get("step_time_seconds") and record["step"] >= WARMUP_STEPS
    ]
    peak = json.loads((folder / "finetune" / "summary.json").read_text())["peak_memory_bytes"]
    return report(case, times, peak)


def report(case: dict[str, Any], times: list[float], peak_bytes: int | None) -> dict[str, Any]:
    seconds = median(times)
    tokens = case["rows"] * case["length"] * (2 if case.get("pairs") else 1)
    return {
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "peak_gib": peak_bytes and round(peak_bytes / 2**30, 1),
    }


def stub_datasets() -> None:
    """TRL imports names of the package `datasets`. Where it is not installed, a list stands for
    `Dataset`, and empty classes for the others: the rows here need no processing."""
    if importlib.util.find_spec("datasets") is not None:
        return

    class Dataset(list):
        cache_files = ()
        info = None

        @property
        def column_names(self) -> list[str]:
            return list(self[0])

        @classmethod
        def from_list(cls, rows: list[dict]) -> "Dataset":
            return cls(rows)

    def empty_class(name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in ("datasets", "datasets.fingerprint"):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "5.0.0"
        module.Dataset = Dataset
        module.__getattr__ = empty_class
        sys.modules[name] = module


def peer_model(shape: str, length: int, dtype: str) -> Any:
    """Transformers' model of a shape, on the GPU if there is one."""
    import torch
    import transformers

    sizes = SHAPES[shape]
    config = transformers.LlamaConfig(
        hidden_size=sizes["embed"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=HEAD_DIM.get(shape, 128),
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=length,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def run_peer(name: str, steps: int, compiled: bool) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    stub_datasets()
    import datasets
    import peft
    import torch
    import transformers
    import trl

    case = CASES[name]
    length, on_gpu = case["length"], torch.cuda.is_available()
    # Adapters are trained over a base in bfloat16, all weights in float32 under autocast.
    model = peer_model(case["shape"], length, "bfloat16" if case.get("lora") else "float32")
    generator = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return generator.integers(4, NUM_WORDS, count).tolist()

    half = length // 2
    if case.get("pairs"):
        rows = [
            {"prompt_ids": tokens(half), "chosen_ids": tokens(half), "rejected_ids": tokens(half)}
            for _ in range(case["rows"] * steps)
        ]
    else:
        rows = [{"input_ids": tokens(length)} for _ in range(case["rows"] * steps)]
        rows = [row | {"labels": row["input_ids"]} for row in rows]

    times: list[float] = []

    class Timer(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    trainer_class, config_class = (
        (trl.DPOTrainer, trl.DPOConfig) if case.get("pairs") else (trl.SFTTrainer, trl.SFTConfig)
    )

    class Trainer(trainer_class):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = list(rows[0])

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            write_tokenizer(Path(folder) / "tokenizer")
        )
        settings = config_class(
            output_dir=f"{folder}/out",
            per_device_train_batch_size=case["rows"],
            max_steps=steps,
            max_length=length,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            torch_compile=compiled,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            dataloader_num_workers=0,
        )
        lora = peft.LoraConfig(
            r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora if case.get("lora") else None,
            callbacks=[Timer()],
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    differences = [after - before for before, after in itertools.pairwise(times)]
    result = report(case, differences[min(WARMUP_STEPS, len(differences) - 1) :], peak)
    return result | {"compiled": compiled}


def measure_peer(name: str, steps: int) -> dict[str, Any]:
    """With torch.compile, or without where that fails."""
    command = [sys.executable, __file__, "--peer", name, "--steps", str(steps)]
    done = None
    for option in (["--compiled"], []):
        done = subprocess.run([*command, *option], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        print(f"{name}, peer {option}: {done.stderr[-600:]}", file=sys.stderr, flush=True)
    raise SystemExit(f"the peer of {name} failed")


def write_adapter(folder: Path, shape: str, seed: int) -> None:
    """A PEFT folder with random factors for all linear layers."""
    import ml_dtypes
    from safetensors.numpy import save_file

    sizes, head_dim = SHAPES[shape], HEAD_DIM.get(shape, 128)
    embed, mlp = sizes["embed"], sizes["mlp"]
    queries, keys = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (embed, queries),
        "self_attn.k_proj": (embed, keys),
        "self_attn.v_proj": (embed, keys),
        "self_attn.o_proj": (queries, embed),
        "mlp.gate_proj": (embed, mlp),
        "mlp.up_proj": (embed, mlp),
        "mlp.down_proj": (mlp, embed),
    }
    generator, tensors = np.random.default_rng(seed), {}
    for layer in range(sizes["layers"]):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for factor, size in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = generator.standard_normal(size, np.float32) * 0.01
                tensors[f"{prefix}.{factor}.weight"] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": TARGETS,
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def decode_with_adapters(shape: str, batch: int, count: int) -> dict[str, Any]:
    """Tokens per second of `batch` sequences: without adapters, and each with one of `count`."""
    from decode import rate  # benchmarks/decode.py

    from maxtext import LLM

    keys = shape_keys(shape) | {
        "decoder_block": "llama2",
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "max_target_length": 1024,
    }
    ids = np.random.default_rng(0).integers(0, NUM_WORDS, (batch, 128))
    new = 256 if shape != "tiny" else 16

    def tokens_per_second(llm: LLM, adapter: list[str] | None) -> float:
        def generate(length: int) -> None:
            llm.generate(ids, max_new_tokens=length, ignore_eos=True, adapter=adapter)

        return round(rate(generate, new, batch), 1)

    base = tokens_per_second(LLM.load("default", **keys), None)
    with tempfile.TemporaryDirectory() as folder:
        folders = {f"adapter{i}": Path(folder) / f"adapter{i}" for i in range(count)}
        for seed, path in enumerate(folders.values()):
            write_adapter(path, shape, seed)
        llm = LLM.load("default", adapters=folders, max_adapters=count, **keys)
    mixed = tokens_per_second(llm, [f"adapter{row % count}" for row in range(batch)])
    unused = tokens_per_second(llm, [""] * batch)
    return {
        "base": base,
        "adapters": mixed,
        "loaded_but_unused": unused,
        "ratio": round(mixed / base, 3),
        "implementations": llm.model.implementations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="sft,lora,qlora,qlora70b,dpo,adapters")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(run_peer(options.peer, options.steps, options.compiled)))
        return
    if options.decode:
        print(json.dumps(decode_with_adapters(options.decode, batch=32, count=8)))
        return
    results = {}
    for name in options.cases.split(","):
        if "adapters" in name:
            shape = name.removesuffix("_adapters") if name != "adapters" else "8b"
            command = [sys.executable, __file__, "--decode", shape]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
        else:
            with tempfile.TemporaryDirectory() as folder:
                result = run_ours(CASES[name], options.steps, Path(folder))
            if CASES[name].get("peer", True) and not options.no_peer:
                result["peer"] = measure_peer(name, options.steps)
                ratio = result["tokens_per_second"] / result["peer"]["tokens_per_second"]
                result["ratio"] = round(ratio, 3)
            results[name] = result
        print(name, results[name], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
