"""From a path to a tokenizer, and from the configuration to one that fits the model's vocabulary.

A path is a file, a folder, `byte`, a name on the Hugging Face hub (org/name) or one that tiktoken
knows (o200k_base). What kind of tokenizer a file is shows in its content; a tokenizer_type that the
user sets must agree. Of several kinds in one folder tokenizer_type chooses, else tokenizer.json
comes first.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers import hub
from maxtext.tokenizers.byte import BYTES, ByteTokenizer
from maxtext.tokenizers.hugging_face import HuggingFaceTokenizer
from maxtext.tokenizers.interface import Tokenizer
from maxtext.tokenizers.sentence_piece import SentencePieceTokenizer
from maxtext.tokenizers.tiktoken_file import TiktokenTokenizer, looks_like_ranks

KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "huggingface": HuggingFaceTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
}
TIKTOKEN_NAMES = (
    "gpt2",
    "r50k_base",
    "p50k_base",
    "p50k_edit",
    "cl100k_base",
    "o200k_base",
    "o200k_harmony",
)


def load_tokenizer(config: MaxTextConfig) -> Tokenizer:
    """The tokenizer of tokenizer_path; bytes without one, since loading fills in the path of a
    published tokenizer.
    """
    path = (config.tokenizer_path or "").strip() or "byte"
    kind = config.tokenizer_type.value if config.source("tokenizer_type").is_user else None
    if path.lower() == "byte":
        tokenizer: Tokenizer = ByteTokenizer(specials=config.vocab_size != BYTES)
        remedy = f", or to {BYTES} for plain bytes without special tokens"
    else:
        tokenizer = open_tokenizer(path, kind, config.hf_access_token)
        remedy = ", or name another tokenizer_path"
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids, but vocab_size={config.vocab_size}: "
            f"set vocab_size to {tokenizer.vocab_size} or more{remedy}"
        )
    return tokenizer


def open_tokenizer(
    path: str, kind: str | None = None, access_token: str | None = None
) -> Tokenizer:
    """`kind`: a tokenizer_type that the content must have; None: whatever it has."""
    if path.lower() == "byte":
        return ByteTokenizer()
    place = local_path(path)
    if not place.exists():
        if path in TIKTOKEN_NAMES and kind in (None, "tiktoken"):
            return TiktokenTokenizer(path)
        if not hub.is_hub_name(path):
            raise ConfigError(
                f"tokenizer_path={path} does not exist: name a file, a folder, org/name of the hub, or byte"
            )
        place = hub.download(path, access_token)
    found = kinds_in(tokenizer_files(place.iterdir()) if place.is_dir() else [place])
    if not found:
        raise ConfigError(
            f"tokenizer_path={path} holds no tokenizer: there should be a tokenizer.json, a SentencePiece *.model or a "
            "*.tiktoken"
        )
    chosen = kind or next(iter(found))
    if chosen not in found:
        raise ConfigError(
            f"tokenizer_path={path} is a {' and a '.join(found)} tokenizer, but tokenizer_type={chosen}: "
            f"set tokenizer_type={next(iter(found))}, or leave it out"
        )
    return KINDS[chosen](found[chosen])


def find_tokenizer(files: Iterable[Path]) -> Tokenizer | None:
    """The tokenizer among the files that came with a model."""
    for kind, file in kinds_in(tokenizer_files(files)).items():
        return KINDS[kind](file)
    return None


def tokenizer_files(files: Iterable[Path]) -> list[Path]:
    """Those of a folder that are named as tokenizers are, a plain `tokenizer` first."""
    named = [
        file
        for file in files
        if file.name == "tokenizer.json" or file.suffix in (".model", ".tiktoken")
    ]
    return sorted(
        filter(Path.is_file, named), key=lambda file: (file.stem != "tokenizer", file.name)
    )


def kinds_in(files: Iterable[Path]) -> dict[str, Path]:
    """The first file of each kind of tokenizer, in the order of `KINDS`."""
    found: dict[str, Path] = {}
    for file in files:
        found.setdefault(kind_of(file), file)
    return {kind: found[kind] for kind in KINDS if kind in found}


def kind_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            first = stream.read(4096)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if file.suffix == ".json" or first.lstrip()[:1] == b"{":
        return "huggingface"
    return "tiktoken" if looks_like_ranks(first) else "sentencepiece"
