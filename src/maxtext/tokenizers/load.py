"""From the configuration to a tokenizer that fits the model's vocabulary, or a ConfigError that says what to change."""

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.tokenizers.byte import BYTES, ByteTokenizer
from maxtext.tokenizers.interface import Tokenizer


def load_tokenizer(config: MaxTextConfig) -> Tokenizer:
    """The tokenizer of tokenizer_path; bytes without one, since loading fills in the path of a published tokenizer."""
    path = (config.tokenizer_path or "").strip() or "byte"
    if path.lower() != "byte":
        raise ConfigError(f"tokenizer_path={path}: this version only has the byte tokenizer, set tokenizer_path=byte")
    tokenizer = ByteTokenizer(specials=config.vocab_size != BYTES)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids, but vocab_size={config.vocab_size}: "
            f"set vocab_size to {tokenizer.vocab_size} or more, or to {BYTES} for plain bytes without special tokens"
        )
    return tokenizer
