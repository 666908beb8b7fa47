"""Opens a tokenizer by its path, checks it against the model's vocabulary, and reads token bytes.

`load_tokenizer` and `open_tokenizer` take a path: a file, a folder, `byte`, a repository on the
Hugging Face Hub (org/name) or a tiktoken encoding (o200k_base). The kind of a tokenizer is detected
from the content of its file and must agree with a tokenizer_type that the user sets. In a folder
with several kinds tokenizer_type chooses; otherwise tokenizer.json comes first.

`text_bytes` returns the bytes that a token adds to a text, for a tokenizer of any kind.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from maxtext.common import hub
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hub import is_hub_name
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers.byte import BYTES, ByteTokenizer
from maxtext.tokenizers.hugging_face import HuggingFaceTokenizer
from maxtext.tokenizers.interface import ENDS_CHARACTER, Tokenizer
from maxtext.tokenizers.sentence_piece import SentencePieceTokenizer
from maxtext.tokenizers.tiktoken_file import TiktokenTokenizer, is_rank_file

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{hub.CHAT_TEMPLATES_DIR}/*.jinja",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "*.tiktoken",
]


def download_tokenizer(name: str, access_token: str | None) -> Path:
    """The folder with the tokenizer's files of a repository. Raises ConfigError if they are neither
    in the cache nor can be downloaded.
    """
    prefix = f"tokenizer_path={name} is neither a local file nor a folder, and "
    return hub.download(name, FILES, access_token, prefix)


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
    """The tokenizer of tokenizer_path, or of bytes if it is empty.

    (The configuration sets the path if model_name has a published tokenizer.) Raises ConfigError if
    it has more ids than vocab_size.
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
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids, "
            f"but vocab_size={config.vocab_size}: "
            f"set vocab_size to {tokenizer.vocab_size} or more{remedy}"
        )
    return tokenizer


def open_tokenizer(
    path: str, kind: str | None = None, access_token: str | None = None
) -> Tokenizer:
    """`kind`: the required tokenizer_type; None accepts any."""
    if path.lower() == "byte":
        return ByteTokenizer()
    location = local_path(path)
    if not location.exists():
        if path in TIKTOKEN_NAMES and kind in (None, "tiktoken"):
            return TiktokenTokenizer(path)
        if not is_hub_name(path):
            raise ConfigError(
                f"tokenizer_path={path} does not exist: "
                "name a file, a folder, org/name of the hub, or byte"
            )
        location = download_tokenizer(path, access_token)
    files = files_by_kind(tokenizer_files(location.iterdir()) if location.is_dir() else [location])
    if not files:
        raise ConfigError(
            f"tokenizer_path={path} has no tokenizer: expected a tokenizer.json, "
            "a SentencePiece *.model or a *.tiktoken"
        )
    chosen = kind or next(iter(files))
    if chosen not in files:
        raise ConfigError(
            f"tokenizer_path={path} is a {' and a '.join(files)} tokenizer, "
            f"but tokenizer_type={chosen}: set tokenizer_type={next(iter(files))}, or leave it out"
        )
    return KINDS[chosen](files[chosen])


def find_tokenizer(files: Iterable[Path]) -> Tokenizer | None:
    """The tokenizer among the files of a model, or None."""
    for kind, file in files_by_kind(tokenizer_files(files)).items():
        return KINDS[kind](file)
    return None


def tokenizer_files(files: Iterable[Path]) -> list[Path]:
    """The files with the name of a tokenizer; those named `tokenizer` first."""
    named = [
        file
        for file in files
        if file.name == "tokenizer.json" or file.suffix in (".model", ".tiktoken")
    ]
    return sorted(
        filter(Path.is_file, named), key=lambda file: (file.stem != "tokenizer", file.name)
    )


def files_by_kind(files: Iterable[Path]) -> dict[str, Path]:
    """The first file of each kind of tokenizer, in the order of `KINDS`."""
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(detect_kind(file), file)
    return {kind: first[kind] for kind in KINDS if kind in first}


def detect_kind(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            head = opened.read(4096)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if file.suffix == ".json" or head.lstrip()[:1] == b"{":
        return "huggingface"
    return "tiktoken" if is_rank_file(head) else "sentencepiece"


SPACE = "▁"  # stands for a space in SentencePiece vocabularies


def concatenates(tokenizer: Tokenizer) -> bool:
    """Whether the text of a sequence is the concatenation of `text_bytes` of its tokens, except for
    spaces at its beginning.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return True
    steps = {"ByteLevel", "ByteFallback", "Metaspace"}
    return bool(steps.intersection(tokenizer.decoder_steps))


def text_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token adds to a text: none for special tokens and ids without a token. A
    token may be a part of a UTF-8 character.
    """
    if token in tokenizer.special_ids or not 0 <= token < tokenizer.vocab_size:
        return b""
    if isinstance(tokenizer, SentencePieceTokenizer):
        if tokenizer.inner.is_byte(token):
            return tokenizer.token_bytes(token)
        is_text = not tokenizer.inner.is_unknown(token) and not tokenizer.inner.is_unused(token)
        return tokenizer.id_to_token(token).replace(SPACE, " ").encode() if is_text else b""
    if isinstance(tokenizer, ByteTokenizer | TiktokenTokenizer):
        data = tokenizer.token_bytes(token)
        return b"" if data == ENDS_CHARACTER else data
    if isinstance(tokenizer, HuggingFaceTokenizer) and token in tokenizer.token_ids:
        if "ByteLevel" in tokenizer.decoder_steps:
            return tokenizer.token_bytes(token)
        text = tokenizer.id_to_token(token)
        if tokenizer.is_byte(token):
            return bytes.fromhex(text[len("<0x") : -1])
        return text.replace(SPACE, " ").encode()
    return b""
