"""`maxtext tokenizer`: trains a tokenizer on local files, or inspects one."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maxtext.cli.arguments import Arguments
from maxtext.cli.positionals import split_overrides
from maxtext.cli.terminal import ProgressBar
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.tokenizers import Tokenizer

KEYS = ("vocab_size", "max_corpus_chars", "train_data_columns")
COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
THREADS = 16  # open files in parallel


def run(arguments: Arguments) -> int:
    return {"train": train, "inspect": inspect}[arguments.task](arguments)


def train(arguments: Arguments) -> int:
    from maxtext.tokenizers.train import MIN_VOCAB_SIZE, train_bpe, train_sentencepiece

    kind = arguments["--kind"]
    config, files = load_config(arguments)
    if config.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={config.vocab_size} is too small: bytes and special tokens alone need "
            f"{MIN_VOCAB_SIZE}"
        )
    path = local_path(arguments["--out"])
    check_output(path, kind, arguments["--overwrite"])
    texts, num_chars, complete = read_texts(files, config)
    with working(f"training {config.vocab_size:,} tokens on {num_chars:,} characters"):
        if kind == "bpe":
            size = train_bpe(texts, config.vocab_size, path)
        else:
            model_type = "bpe" if kind == "sentencepiece-bpe" else "unigram"
            size = train_sentencepiece(texts, config.vocab_size, path, model_type)
    part = "" if complete else ", a sample of the text (--max-chars)"
    less = (
        ""
        if size == config.vocab_size
        else f"; the text has no more, {config.vocab_size:,} were requested"
    )
    print(f"wrote {path}: {size:,} tokens from {num_chars:,} characters{part}{less}")
    return 0


def load_config(arguments: Arguments) -> tuple[MaxTextConfig, list[str]]:
    """The configuration of the few keys that apply here, and the files to read."""
    from maxtext.configs.derive import Devices
    from maxtext.input_pipeline.formats import find_files
    from maxtext.models.configuration import load

    patterns, overrides = split_overrides(arguments.args)
    for key in (override.partition("=")[0] for override in overrides):
        if key not in KEYS:
            raise ConfigError(
                f"{key} has no effect on tokenizer training; the keys are {', '.join(KEYS)}"
            )
    config = load(None, [*arguments.settings, *overrides], devices=Devices(1))
    if len(config.train_data_columns) != 1:
        raise ConfigError(f"train_data_columns={config.train_data_columns}: name one column")
    if not patterns:
        raise ConfigError(f"name the training files: {arguments.usage}")
    return config, list(
        dict.fromkeys(file for arg in patterns for file in find_files("FILES", arg))
    )


def read_texts(files: list[str], config: MaxTextConfig) -> tuple[list[str], int, bool]:
    """(texts to train on, their number of characters, whether this is all text of the files)."""
    from maxtext.input_pipeline.formats import BadRecord, Documents, kind_of, open_files
    from maxtext.tokenizers.train import sample_texts

    kinds = {file: kind_of(file) or "text" for file in files}
    column, max_chars = config.train_data_columns[0], config.max_corpus_chars
    parts = [
        open_files([file for file in files if kinds[file] == kind], kind, [column], THREADS)
        for kind in sorted(set(kinds.values()))
    ]
    documents = Documents(parts)
    with ProgressBar("reading") as progress:

        def show(done: int) -> None:
            if progress:
                progress(done, min(documents.nbytes, max_chars), "reading")

        try:
            texts = list(sample_texts(documents, column, documents.nbytes, max_chars, show))
        except BadRecord as error:
            raise ConfigError(f"{error}: fix the file, or leave it out") from error
    if not texts:
        raise ConfigError(f"there is no text in the {len(files)} files, among them {files[0]}")
    return texts, sum(map(len, texts)), documents.nbytes <= max_chars


def check_output(path: Path, kind: str, overwrite: bool) -> None:
    if kind == "bpe" and (path.suffix in (".json", ".model") or path.is_file()):
        raise ConfigError(f"--out {path}: the kind bpe writes a folder, name one")
    if kind != "bpe" and (path.suffix != ".model" or path.is_dir()):
        raise ConfigError(
            f"--out {path}: the kind {kind} writes one file, give it a name that ends in .model"
        )
    if not overwrite and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise ConfigError(
            f"--out {path} exists: choose another path, or replace it with --overwrite"
        )


@contextlib.contextmanager
def working(title: str) -> Iterator[None]:
    """Show a spinner on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


def inspect(arguments: Arguments) -> int:
    from maxtext.tokenizers import open_tokenizer

    if not arguments.args:
        raise ConfigError(f"name a tokenizer: {arguments.usage}")
    name, *texts = arguments.args
    tokenizer, text = open_tokenizer(name), " ".join(texts) if texts else None
    details = description(tokenizer, text)
    if arguments["--json"]:
        print(json.dumps(details))
    else:
        show(details)
    return 0


def description(tokenizer: "Tokenizer", text: str | None) -> Json:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    details: Json = {
        "name": tokenizer.name,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "special": {
            name: None if token is None else {"id": token, "piece": tokenizer.id_to_token(token)}
            for name, token in ids.items()
        },
        "chat_template": tokenizer.chat_template is not None,
    }
    if text is not None:
        tokens = tokenizer.encode(text)
        details |= {
            "tokens": [{"id": token, "piece": tokenizer.id_to_token(token)} for token in tokens],
            "bytes": len(text.encode("utf-8", errors="replace")),
            "round_trip": tokenizer.decode(tokens) == text,
            "decoded": tokenizer.decode(tokens),
        }
    return details


def show(details: Json) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{details['name']}: {details['kind']}, {details['vocab_size']:,} ids", style="bold"
    )
    for name, token in details["special"].items():
        console.print(f"  {name}  {'none' if token is None else '{id}  {piece}'.format(**token)}")
    console.print(f"  chat template  {'yes' if details['chat_template'] else 'no'}")
    if "tokens" not in details:
        return
    line = Text()
    for index, token in enumerate(details["tokens"]):
        # Escaped as in Python: a newline or escape sequence in a token must not move the cursor.
        line.append(repr(token["piece"])[1:-1], style=f"black on {COLOURS[index % len(COLOURS)]}")
        line.append(f"({token['id']}) ", style="dim")
    console.print(line)
    count = len(details["tokens"])
    ratio = f", {details['bytes'] / count:.2f} bytes per token" if count else ""
    console.print(f"{count:,} tokens for {details['bytes']:,} bytes{ratio}")
    if details["round_trip"]:
        console.print("round trip: exact", style="green")
    else:
        console.print(f"round trip: differs, {details['decoded']!r}", style="yellow")
