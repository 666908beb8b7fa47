"""What a tiktoken file does not say: how text is split before merging, and the special tokens after
the ranks.

The number of ranks tells the published vocabularies: Llama 3, Kimi K2, r50k_base (GPT-2),
cl100k_base, o200k_base. Any other file is used as Llama 3's are: its pattern, and its 256 special
tokens; the log says so. A tokenizer_config.json beside the file has the last word on the names of
special tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.tokenizers.beside import special_texts

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
DIGITS = r"\p{N}{1,3}"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = rf"{ENDINGS}|{BEFORE}\p{{L}}+|{DIGITS}|{SIGNS}"
WORDS = rf"{LETTERS}|{SPACES}"
ENDOFTEXT = "<|endoftext|>"
RESERVED = 256  # ids after the ranks, in Llama 3 and Kimi K2
LLAMA4 = 200_000


@dataclass(frozen=True)
class Scheme:
    """The pattern of the pieces that text is split into, the ids of special tokens, and which of
    them are what.
    """

    pattern: str
    specials: dict[str, int]
    bos: str | None
    eos: str
    pad: str | None = None


def cased(but: str = "") -> str:
    """Words whose capitals come first; `but` narrows what a letter is."""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    return rf"{BEFORE}{upper}*{lower}+{ENDINGS}?|{BEFORE}{upper}+{lower}*{ENDINGS}?"


def llama3(ranks: int) -> Scheme:
    """As of Llama 3.1: version 3.0 has the same ids, three of them still without a name."""
    named = {
        0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
        8: "eom_id", 9: "eot_id", 10: "python_tag",
    }  # fmt: skip
    reserved = iter(range(RESERVED))
    names = [
        named.get(place) or f"reserved_special_token_{next(reserved)}" for place in range(RESERVED)
    ]
    specials = {f"<|{name}|>": ranks + place for place, name in enumerate(names)}
    return Scheme(
        WORDS, specials, "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
    )


def kimi(ranks: int) -> Scheme:
    """Han characters apart from other words. Its tokenizer_config.json names more special
    tokens.
    """
    reserved = {
        f"<|reserved_token_{token}|>": token for token in range(ranks + 2, ranks + RESERVED)
    }
    not_han = r"&&[^\p{Han}]"
    pattern = rf"[\p{{Han}}]+|{cased(not_han)}|{DIGITS}|{SIGNS}|{SPACES}"
    return Scheme(pattern, {"[BOS]": ranks, "[EOS]": ranks + 1, **reserved}, "[BOS]", "[EOS]")


def r50k(_: int) -> Scheme:
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return Scheme(pattern, {ENDOFTEXT: 50256}, None, ENDOFTEXT)


def cl100k(_: int) -> Scheme:
    fim = {
        f"<|fim_{name}|>": 100258 + place
        for place, name in enumerate(("prefix", "middle", "suffix"))
    }
    pattern = rf"{LETTERS}|\s++$|{SPACES}"  # as Llama 3's, but for white space at the end of a text
    return Scheme(pattern, {ENDOFTEXT: 100257, **fim, "<|endofprompt|>": 100276}, None, ENDOFTEXT)


def o200k(_: int) -> Scheme:
    pattern = rf"{cased()}|{DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    return Scheme(pattern, {ENDOFTEXT: 199999, "<|endofprompt|>": 200018}, None, ENDOFTEXT)


PUBLISHED = {128000: llama3, 163584: kimi, 50256: r50k, 100256: cl100k, 199998: o200k}


def scheme_of(path: Path, ranks: int, settings: dict[str, Any], quiet: bool) -> Scheme:
    """For a file with so many ranks, and the settings beside it."""
    if ranks == LLAMA4:
        raise ConfigError(
            f"{path} has the {ranks} tokens of Llama 4: use the tokenizer.json that is published with it"
        )
    if ranks not in PUBLISHED and not quiet:
        LOGGER.warning(
            "%s has %d tokens, as no published vocabulary known here: used as Llama 3's are",
            path,
            ranks,
        )
    return renamed(PUBLISHED.get(ranks, llama3)(ranks), path, ranks, settings)


def renamed(scheme: Scheme, path: Path, ranks: int, settings: dict[str, Any]) -> Scheme:
    """With the names that tokenizer_config.json gives to the ids after the ranks."""
    try:
        given = {
            int(token): str(entry["content"])
            for token, entry in settings.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        file = path.parent / "tokenizer_config.json"
        raise ConfigError(
            f"{file}: added_tokens_decoder must give a content for each id ({error!r})"
        ) from error
    names = {token: text for text, token in scheme.specials.items()}
    names |= {token: text for token, text in given.items() if token >= ranks}
    specials = {text: token for token, text in names.items()}
    said = {name: text for name, text in special_texts(settings).items() if text in specials}
    scheme_says = {"bos": scheme.bos, "eos": scheme.eos, "pad": scheme.pad}
    use = {
        key: said.get(f"{key}_token", text if text in specials else None)
        for key, text in scheme_says.items()
    }
    if use["eos"] is None:
        raise ConfigError(
            f"{path.parent / 'tokenizer_config.json'} names no eos_token that is a special token"
        )
    return replace(scheme, specials=specials, bos=use["bos"], eos=use["eos"], pad=use["pad"])
