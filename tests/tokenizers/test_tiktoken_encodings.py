"""The patterns and special tokens of published tiktoken encodings."""

import json

import pytest
import regex
import tiktoken

from maxtext.common.errors import ConfigError
from maxtext.tokenizers import open_tokenizer, tiktoken_file
from tests.tokenizers.tiny import CHATML, CORPUS, tiny_ranks, write_tiktoken

TEXTS = [
    *CORPUS,
    "it'S HE'LL  don't\r\n\r\n  x\n\n",
    "a/b//c\n/d 123456 ½ Ⅷ",
    "Ünïcödé ǅ ʰ 日本go漢字 \u0301x",
    " \n ",
    "x  ",
    "\t\n  ",
    "HTTPServer.getName();\n/x",
]


def test_kimi_pattern_and_special_tokens_equal_the_published_ones():
    """The pattern is that of its tokenization_kimi.py."""
    letters = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    upper, lower, endings = (
        rf"[\p{{Lu}}\p{{Lt}}{letters}",
        rf"[\p{{Ll}}{letters}",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    )
    parts = [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    spec = tiktoken_file.kimi(163584)
    assert spec.pattern == "|".join(parts)
    assert (spec.specials["[BOS]"], spec.specials["[EOS]"]) == (163584, 163585)
    assert sorted(spec.specials.values()) == list(range(163584, 163840))
    inner = tiktoken.Encoding(
        "kimi", pat_str=spec.pattern, mergeable_ranks=tiny_ranks(320), special_tokens={}
    )
    assert [inner.decode(inner.encode_ordinary(text)) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_patterns_and_special_tokens_equal_tiktokens(name, monkeypatch):
    """Against tiktoken's own definitions, without the ranks, which would be downloaded."""
    import tiktoken_ext.openai_public as published

    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: {})
    reference = published.ENCODING_CONSTRUCTORS[name]()
    spec = getattr(tiktoken_file, name.removesuffix("_base"))(0)
    assert spec.specials == reference["special_tokens"]
    split = [regex.findall(spec.pattern, text) for text in TEXTS]
    assert split == [regex.findall(reference["pat_str"], text) for text in TEXTS]
    assert ["".join(parts) for parts in split] == TEXTS


def test_llama3_special_tokens():
    """The ids are those of Llama 3.1."""
    specials = tiktoken_file.llama3(128000).specials
    published = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|reserved_special_token_0|>": 128002,
        "<|reserved_special_token_1|>": 128003,
        "<|finetune_right_pad_id|>": 128004,
        "<|reserved_special_token_2|>": 128005,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
        "<|reserved_special_token_3|>": 128011,
        "<|reserved_special_token_247|>": 128255,
    }
    assert published.items() <= specials.items()
    assert sorted(specials.values()) == list(range(128000, 128256))


def test_tokenizer_config_names_the_special_tokens(tmp_path):
    file = write_tiktoken(tmp_path / "tiktoken.model")
    settings = {
        "added_tokens_decoder": {
            "320": {"content": "[BOS]"},
            "330": {"content": "<|im_end|>"},
            "5": {"content": "no"},
        },
        "bos_token": "[BOS]",
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "unheard of",
        "chat_template": CHATML,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for path in (file, tmp_path):
        tokenizer = open_tokenizer(str(path))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (
            320,
            330,
            324,
            576,
        )
        assert tokenizer.encode_with_specials("[BOS]<|im_end|><|eot_id|>") == [320, 330, 329]
        assert tokenizer.chat_template == CHATML
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"320": {}}}')
    with pytest.raises(
        ConfigError, match="tokenizer_config.json: added_tokens_decoder must give a content"
    ):
        open_tokenizer(str(file))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"321": {"content": "x"}}}'
    )
    with pytest.raises(ConfigError, match="names no eos_token"):
        open_tokenizer(str(file))


def test_rejects_llama4_ranks():
    from pathlib import Path

    with pytest.raises(ConfigError, match="Llama 4: use the tokenizer.json"):
        tiktoken_file.encoding_spec(Path("tokenizer.model"), 200_000, {})
