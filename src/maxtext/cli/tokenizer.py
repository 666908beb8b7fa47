"""`maxtext tokenizer`: train one on local files, or show what one is and what it makes of a
text.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.cli import arguments
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.tokenizers import Tokenizer

KINDS = ("bpe", "sentencepiece", "sentencepiece-bpe")
KEYS = ("vocab_size", "max_corpus_chars", "train_data_columns")
COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
THREADS = 16  # that open files


def run(args: list[str]) -> int:
    if not args or args[0] not in ("train", "inspect"):
        raise ConfigError(
            "say what to do: maxtext tokenizer train --out PATH FILES..., or inspect PATH [TEXT]"
        )
    return {"train": train, "inspect": inspect}[args[0]](args[1:])


def train(args: list[str]) -> int:
    from maxtext.tokenizers.train import MIN_VOCAB_SIZE, train_bpe, train_sentencepiece

    overwrite = arguments.take_flag(args, "--overwrite")
    kind = arguments.take_option(args, "--kind", KINDS) or "bpe"
    out = arguments.take_value(args, "--out")
    keys = {
        "vocab_size": arguments.take_value(args, "--vocab-size"),
        "max_corpus_chars": arguments.take_value(args, "--max-chars"),
    }
    settings = [f"{key}={value}" for key, value in keys.items() if value is not None]
    if column := arguments.take_value(args, "--column"):
        settings.append(f"train_data_columns={json.dumps([column])}")
    config, files = settled(settings, args)
    if out is None:
        raise ConfigError(
            "say where to write: --out FOLDER for bpe, --out FILE.model for the other kinds"
        )
    if config.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={config.vocab_size} is too small: bytes and special tokens alone are {MIN_VOCAB_SIZE}"
        )
    place = local_path(out)
    check_place(place, kind, overwrite)
    texts, used, everything = read(files, config)
    with working(f"learning {config.vocab_size:,} tokens from {used:,} characters"):
        if kind == "bpe":
            size = train_bpe(texts, config.vocab_size, place)
        else:
            model_type = "bpe" if kind == "sentencepiece-bpe" else "unigram"
            size = train_sentencepiece(texts, config.vocab_size, place, model_type)
    part = "" if everything else ", a part of the text (--max-chars)"
    less = (
        ""
        if size == config.vocab_size
        else f"; the text has no more in it, {config.vocab_size:,} were wanted"
    )
    print(f"wrote {place}: {size:,} tokens from {used:,} characters{part}{less}")
    return 0


def settled(settings: list[str], args: list[str]) -> tuple[Any, list[str]]:
    """The configuration with its few keys that count here, and the files."""
    from maxtext.configs import load
    from maxtext.configs.derive import Devices
    from maxtext.input_pipeline.formats import find_files

    named = []
    for arg in args:
        key = arg.partition("=")[0]
        if "=" in arg and not os.path.exists(arg):
            if key not in KEYS:
                raise ConfigError(
                    f"{key}= means nothing to the training of a tokenizer: only {', '.join(KEYS)} do"
                )
            settings.append(arg)
        elif arg.startswith("-"):
            raise ConfigError(f"unknown option {arg!r}; `maxtext tokenizer --help` lists them")
        else:
            named.append(arg)
    config = load(None, settings, devices=Devices(1))
    if len(config.train_data_columns) != 1:
        raise ConfigError(f"train_data_columns={config.train_data_columns}: name one column")
    if not named:
        raise ConfigError(
            "name the files to learn from: maxtext tokenizer train --out PATH FILES..."
        )
    return config, list(dict.fromkeys(file for arg in named for file in find_files("FILES", arg)))


def read(files: list[str], config: MaxTextConfig) -> tuple[list[str], int, bool]:
    """The texts to learn from, their characters, and whether this is all that the files have."""
    from maxtext.cli.convert import Bar
    from maxtext.input_pipeline.formats import BadRecord, Documents, kind_of, open_files
    from maxtext.tokenizers.train import sample_texts

    kinds = {file: kind_of(file) or "text" for file in files}
    column, most = config.train_data_columns[0], config.max_corpus_chars
    parts = [
        open_files([file for file in files if kinds[file] == kind], kind, [column], THREADS)
        for kind in sorted(set(kinds.values()))
    ]
    documents = Documents(parts)
    with Bar("reading") as progress:

        def show(done: int) -> None:
            if progress:
                progress(done, min(documents.nbytes, most), "reading")

        try:
            texts = list(sample_texts(documents, column, documents.nbytes, most, show))
        except BadRecord as error:
            raise ConfigError(f"{error}: mend the file, or leave it out") from error
    if not texts:
        raise ConfigError(f"there is no text in the {len(files)} files, among them {files[0]}")
    return texts, sum(map(len, texts)), documents.nbytes <= most


def check_place(place: Path, kind: str, overwrite: bool) -> None:
    if kind == "bpe" and (place.suffix in (".json", ".model") or place.is_file()):
        raise ConfigError(f"--out {place}: the kind bpe writes a folder, name one")
    if kind != "bpe" and (place.suffix != ".model" or place.is_dir()):
        raise ConfigError(
            f"--out {place}: the kind {kind} writes one file, give it a name that ends in .model"
        )
    if not overwrite and (place.is_file() or (place.is_dir() and any(place.iterdir()))):
        raise ConfigError(
            f"--out {place} exists: choose another place, or replace it with --overwrite"
        )


@contextlib.contextmanager
def working(title: str) -> Iterator[None]:
    """A sign of life on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


def inspect(args: list[str]) -> int:
    from maxtext.tokenizers import open_tokenizer

    as_json = arguments.take_flag(args, "--json")
    if not args or args[0].startswith("-"):
        raise ConfigError("name a tokenizer: maxtext tokenizer inspect PATH [TEXT] [--json]")
    tokenizer = open_tokenizer(args[0])
    text = " ".join(args[1:]) if len(args) > 1 else None
    found = description(tokenizer, text)
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


def description(tokenizer: "Tokenizer", text: str | None) -> dict[str, Any]:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    found: dict[str, Any] = {
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
        found |= {
            "tokens": [{"id": token, "piece": tokenizer.id_to_token(token)} for token in tokens],
            "bytes": len(text.encode("utf-8", errors="replace")),
            "round_trip": tokenizer.decode(tokens) == text,
            "decoded": tokenizer.decode(tokens),
        }
    return found


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{found['name']}: {found['kind']}, {found['vocab_size']:,} ids", style="bold")
    for name, token in found["special"].items():
        console.print(f"  {name}  {'none' if token is None else '{id}  {piece}'.format(**token)}")
    console.print(f"  chat template  {'yes' if found['chat_template'] else 'no'}")
    if "tokens" not in found:
        return
    line = Text()
    for place, token in enumerate(found["tokens"]):
        # As Python writes it: a line end or an escape sequence in a token must not move the cursor.
        line.append(repr(token["piece"])[1:-1], style=f"black on {COLOURS[place % len(COLOURS)]}")
        line.append(f"({token['id']}) ", style="dim")
    console.print(line)
    count = len(found["tokens"])
    each = f", {found['bytes'] / count:.2f} bytes a token" if count else ""
    console.print(f"{count:,} tokens for {found['bytes']:,} bytes{each}")
    if found["round_trip"]:
        console.print("round trip: the same text", style="green")
    else:
        console.print(f"round trip: another text, {found['decoded']!r}", style="yellow")
