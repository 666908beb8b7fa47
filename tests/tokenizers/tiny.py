"""Tiny vocabularies of every kind, trained by the libraries themselves."""

import base64
import io
import json
from itertools import product
from pathlib import Path

SENTENCE = (
    "the quick brown fox jumps over the lazy dog while seven wizards brew hot tea and 1234567 "
    "liters of it cool"
)
CORPUS = [
    f"{SENTENCE.title()} {number}.\n\n\t{SENTENCE[::-1]}\n"
    f"Äpfel, Öl und Übermut; été; 日本語の本。 🙂 it's {number * 37}"
    for number in range(60)
]
# With enough different substrings for a unigram vocabulary of several hundred pieces.
SYLLABLES = (["to", "re", "ku", "ma"], ["lin", "sta", "ve", "gor"], ["ing", "er", "ed", "ly"])
WORDS = ["".join(word) for word in product(*SYLLABLES)]
VARIED_CORPUS = [
    f"{text} {' '.join(WORDS[number % 13 :: 7])}" for number, text in enumerate(CORPUS)
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "special": True}
SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def train_tiny_bpe(vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_bpe(folder: Path, vocab_size: int = 400, chat_template: str | None = CHATML) -> Path:
    """A folder as Hugging Face has it: 0 <pad>, 1 <s>, 2 </s>, 3 <|im_start|>, 4 <|im_end|>, then
    byte-level BPE.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train_tiny_bpe(vocab_size).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
    settings |= {"pad_token": "<pad>", "clean_up_tokenization_spaces": False}
    settings |= {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_byte_fallback(folder: Path) -> Path:
    """Like tokenizer.json of Llama 2: "▁" for spaces, `<0xE6>` … for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted(
        {letter for letter in "".join(CORPUS) if letter.isascii() and letter > " "} | {"日", "é"}
    )
    merges = [("▁", letter) for letter in letters]
    pieces += [*letters, *("▁" + letter for letter in letters)]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_sentencepiece(path: Path, vocab_size: int = 400) -> Path:
    """A file *.model: 0 <unk>, 1 <s>, 2 </s>, 3 <sep>, 4 <sep>> (control symbols), bytes to fall
    back on, pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=vocab_size,
        byte_fallback=True,
        control_symbols=["<sep>", "<sep>>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


def write_tiktoken(path: Path, ranks: int = 320) -> Path:
    """A file of ranks; read as Llama 3's, so its special tokens are the 256 ids after them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tiny_ranks(ranks).items()
    ]
    path.write_text("".join(lines))
    return path


def tiny_ranks(count: int) -> dict[bytes, int]:
    tokens = sorted(
        train_tiny_bpe(count + len(SPECIALS)).get_vocab().items(), key=lambda item: item[1]
    )[len(SPECIALS) :]
    byte_of = byte_letters()
    return {
        bytes(byte_of[letter] for letter in token): rank for rank, (token, _) in enumerate(tokens)
    }


def byte_letters() -> dict[str, int]:
    """The letters of bytes in byte-level BPE: printable bytes stand for themselves, the others are
    the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(unprintable)
    }
