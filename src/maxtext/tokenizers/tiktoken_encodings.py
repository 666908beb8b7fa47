"""What a tiktoken file lacks: the pattern that splits text into pre-tokens, and the special tokens.

The number of ranks identifies the published encodings: Llama 3, Kimi K2, r50k_base (GPT-2),
cl100k_base, o200k_base. Any other file is read as Llama 3's, with its pattern and its 256 special
tokens, after a warning. A tokenizer_config.json next to the file overrides the names of special
tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.tokenizers.tokenizer_config import special_token_texts

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PREFIX = r"[^\r\n\p{L}\p{N}]?"
DIGITS = r"\p{N}{1,3}"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
NON_WHITESPACE = rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|{DIGITS}|{PUNCTUATION}"
LLAMA3_PATTERN = rf"{NON_WHITESPACE}|{WHITESPACE}"
ENDOFTEXT = "<|endoftext|>"
NUM_SPECIALS = 256  # ids after the ranks, in Llama 3 and Kimi K2
LLAMA4_RANKS = 200_000


@dataclass(frozen=True)
class EncodingSpec:
    """The pattern of pre-tokens, the ids of special tokens by text, and the roles of some."""

    pattern: str
    specials: dict[str, int]
    bos: str | None
    eos: str
    pad: str | None = None


def cased_words(intersection: str = "") -> str:
    """Words that are split before a capital letter; `intersection` narrows the letter classes."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{intersection}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{intersection}]"
    mixed_case = rf"{PREFIX}{upper}*{lower}+{CONTRACTIONS}?"
    upper_case = rf"{PREFIX}{upper}+{lower}*{CONTRACTIONS}?"
    return f"{mixed_case}|{upper_case}"


def llama3(num_ranks: int) -> EncodingSpec:
    """Llama 3.1. Version 3.0 has the same ids; three of them are reserved there."""
    named = {
        0: "begin_of_text",
        1: "end_of_text",
        4: "finetune_right_pad_id",
        6: "start_header_id",
        7: "end_header_id",
        8: "eom_id",
        9: "eot_id",
        10: "python_tag",
    }
    reserved = iter(range(NUM_SPECIALS))
    names = [
        named.get(index) or f"reserved_special_token_{next(reserved)}"
        for index in range(NUM_SPECIALS)
    ]
    return EncodingSpec(
        LLAMA3_PATTERN,
        specials={f"<|{name}|>": num_ranks + index for index, name in enumerate(names)},
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        pad="<|finetune_right_pad_id|>",
    )


def kimi(num_ranks: int) -> EncodingSpec:
    """Kimi K2 splits Han characters from other words. Its tokenizer_config.json names more special
    tokens.
    """
    reserved = {
        f"<|reserved_token_{token_id}|>": token_id
        for token_id in range(num_ranks + 2, num_ranks + NUM_SPECIALS)
    }
    not_han = r"&&[^\p{Han}]"
    return EncodingSpec(
        rf"[\p{{Han}}]+|{cased_words(not_han)}|{DIGITS}|{PUNCTUATION}|{WHITESPACE}",
        specials={"[BOS]": num_ranks, "[EOS]": num_ranks + 1, **reserved},
        bos="[BOS]",
        eos="[EOS]",
    )


def r50k(_: int) -> EncodingSpec:
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return EncodingSpec(pattern, {ENDOFTEXT: 50256}, bos=None, eos=ENDOFTEXT)


def cl100k(_: int) -> EncodingSpec:
    specials = {
        ENDOFTEXT: 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }
    # Llama 3's pattern, except for white space at the end of a text.
    pattern = rf"{NON_WHITESPACE}|\s++$|{WHITESPACE}"
    return EncodingSpec(pattern, specials, bos=None, eos=ENDOFTEXT)


def o200k(_: int) -> EncodingSpec:
    pattern = rf"{cased_words()}|{DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    specials = {ENDOFTEXT: 199999, "<|endofprompt|>": 200018}
    return EncodingSpec(pattern, specials, bos=None, eos=ENDOFTEXT)


# by number of ranks
PUBLISHED = {128000: llama3, 163584: kimi, 50256: r50k, 100256: cl100k, 199998: o200k}


def encoding_spec(
    path: Path, num_ranks: int, tokenizer_config: dict[str, Any], warn: bool = True
) -> EncodingSpec:
    """The spec of a file with `num_ranks` ranks; `tokenizer_config` may rename special tokens."""
    if num_ranks == LLAMA4_RANKS:
        raise ConfigError(
            f"{path} has the {num_ranks} tokens of Llama 4: "
            "use the tokenizer.json that is published with it"
        )
    if num_ranks not in PUBLISHED and warn:
        LOGGER.warning(
            "%s has %d tokens, which is no published encoding known here: reading it as Llama 3's",
            path,
            num_ranks,
        )
    spec = PUBLISHED.get(num_ranks, llama3)(num_ranks)
    return rename_special_tokens(spec, path, num_ranks, tokenizer_config)


def rename_special_tokens(
    spec: EncodingSpec, path: Path, num_ranks: int, tokenizer_config: dict[str, Any]
) -> EncodingSpec:
    """Apply the texts and roles that tokenizer_config.json gives to the ids after the ranks."""
    try:
        added_tokens = {
            int(token_id): str(entry["content"])
            for token_id, entry in tokenizer_config.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = path.parent / "tokenizer_config.json"
        raise ConfigError(
            f"{file}: added_tokens_decoder must give a content for each id ({error!r})"
        ) from error
    texts = {token_id: text for text, token_id in spec.specials.items()}
    texts |= {token_id: text for token_id, text in added_tokens.items() if token_id >= num_ranks}
    specials = {text: token_id for token_id, text in texts.items()}

    def role(name: str, default: str | None) -> str | None:
        text = special_token_texts(tokenizer_config).get(name)
        if text in specials:
            return text
        return default if default in specials else None

    eos = role("eos_token", spec.eos)
    if eos is None:
        raise ConfigError(
            f"{path.parent / 'tokenizer_config.json'} names no eos_token that is a special token"
        )
    return replace(
        spec,
        specials=specials,
        bos=role("bos_token", spec.bos),
        eos=eos,
        pad=role("pad_token", spec.pad),
    )
