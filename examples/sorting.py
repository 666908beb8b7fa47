"""What the examples share: a task, a tokenizer, a base model, and a measurement.

The task is to sort the letters of a word: the user says "sort: dbca", the assistant "abcd". The
base model is a Llama of 114,000 parameters that this module trains on text in the same alphabet. It
is a Hugging Face folder, as if it came from the hub. It has never seen a conversation.
"""

import argparse
import json
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from maxtext import LLM
from maxtext.tokenizers import chat_template

SPECIAL_TOKENS = ["<pad>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = [*SPECIAL_TOKENS, *string.ascii_letters, " ", ":"]
MODEL = {
    "decoder_block": "llama2",
    "vocab_size": len(VOCABULARY),
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 16,
    "base_mlp_dim": 192,
    "base_num_decoder_layers": 2,
}
# Of every training here. CPUs compute in float32 natively; the data is too small for workers.
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "remat_policy": "none",
    "max_target_length": 128,
    "per_device_batch_size": 8,
    "grain_worker_count": 0,
    "enable_tensorboard": False,
}


@dataclass(frozen=True)
class Settings:
    """The sizes of an example, from the command line."""

    folder: Path
    steps: int
    base_steps: int
    rows: int
    heldout: int


def parse_arguments(description: str | None, steps: int, base_steps: int = 200) -> Settings:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=Path("maxtext_output/examples"))
    parser.add_argument("--steps", type=int, default=steps, help="of fine-tuning")
    parser.add_argument(
        "--base-steps", type=int, default=base_steps, help="of training the base model"
    )
    parser.add_argument("--rows", type=int, default=5000, help="to learn from")
    parser.add_argument("--heldout", type=int, default=200, help="words to measure on")
    return Settings(**vars(parser.parse_args()))


def random_words(count: int, seed: int) -> list[str]:
    """Words of four to seven different letters."""
    rng = random.Random(seed)
    return ["".join(rng.sample(string.ascii_lowercase, rng.randint(4, 7))) for _ in range(count)]


def training_words(settings: Settings) -> list[str]:
    heldout = set(heldout_words(settings))
    return [word for word in random_words(settings.rows, seed=1) if word not in heldout]


def heldout_words(settings: Settings) -> list[str]:
    return random_words(settings.heldout, seed=2)


def prompt(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"sort: {word}"}]


def reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def conversation(word: str) -> dict[str, Any]:
    """A row for `maxtext sft`."""
    return {"messages": prompt(word) + reply("".join(sorted(word)))}


def generate(llm: LLM, words: Iterable[str], temperature: float = 0.0) -> list[str]:
    """What the model replies to each word."""
    assert llm.tokenizer is not None
    template = chat_template(llm.config, llm.tokenizer)
    assert template is not None
    prompts = [template.render(prompt(word), add_generation_prompt=True) for word in words]
    return llm.generate(prompts, max_new_tokens=12, temperature=temperature)


def exact_match(llm: LLM, words: list[str]) -> float:
    """The share of words that the model sorts without an error, with greedy decoding."""
    answers = ["".join(sorted(word)) for word in words]
    replies = generate(llm, words)
    return sum(a == b for a, b in zip(replies, answers, strict=True)) / len(words)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def new_folder(settings: Settings, name: str) -> Path:
    """The path of a run's folder, without the files of an earlier run."""
    folder = settings.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def run_command(command: str, keys: dict[str, Any]) -> None:
    """Run `maxtext COMMAND key=value …` and show it."""
    arguments = [command, *(f"{key}={value}" for key, value in keys.items())]
    print("$ maxtext", " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "maxtext", *arguments], check=True)


def base_model(settings: Settings) -> Path:
    """The folder of the base model. It is trained on first use."""
    folder = settings.folder / "base"
    if folder.is_dir():
        return folder
    tokenizer = write_tokenizer(settings.folder / "tokenizer")
    keys = {
        **MODEL,
        **COMMON,
        "tokenizer_path": tokenizer,
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "grain_train_files": write_jsonl(settings.folder / "base.jsonl", base_texts()),
        "num_epoch": 20,
        "learning_rate": 3e-3,
        "steps": settings.base_steps,
        "base_output_directory": settings.folder,
        "run_name": "pretraining",
    }
    run = new_folder(settings, "pretraining")
    run_command("train", keys)
    incomplete = new_folder(settings, "base.incomplete")
    LLM.load(run).save_hf(incomplete)
    shutil.copytree(tokenizer, incomplete, dirs_exist_ok=True)
    incomplete.rename(folder)
    return folder


def base_texts() -> Iterable[dict[str, str]]:
    """What the base model learns: to repeat a word, to write it in capitals, the alphabet."""
    rng = random.Random(0)
    for word in random_words(8000, seed=0):
        start = rng.randrange(20)
        texts = (f"{word} {word}", f"{word} {word.upper()}", string.ascii_lowercase[start:][:7])
        yield {"text": rng.choice(texts)}


def write_tokenizer(
    folder: Path,
    vocabulary: list[str] = VOCABULARY,
    special_tokens: list[str] = SPECIAL_TOKENS,
    pattern: str = ".",
    template: str = CHAT_TEMPLATE,
) -> Path:
    """A token for each match of `pattern`, by default each character, in the files of a Hugging
    Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    settings |= {"eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder
