"""Train tokenizers: byte-level BPE as a Hugging Face folder, or a SentencePiece model.

The same text gives the same vocabulary on every machine. All kinds have <pad>, <s>, </s> as ids 0,
1, 2, and a token for every byte, so that any text survives the round trip (except for U+2581, which
is a space to SentencePiece).
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.files import atomic_writer, write_text
from maxtext.tokenizers.text_utils import replace_surrogates
from maxtext.tokenizers.tiktoken_file import LLAMA3_PATTERN

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
MIN_VOCAB_SIZE = 256 + 4  # bytes, special tokens, and SentencePiece's unknown token
MAX_LINE_CHARS = 4096  # SentencePiece skips longer lines, so they are split
NUM_THREADS = 16  # SentencePiece's result depends on it, so it does not depend on the machine
MIN_EXCERPT_CHARS = 10_000  # taken from a document at once, if not all text is used


class Records(Protocol):
    """Documents by index, each with columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, object]: ...


def sample_texts(
    documents: Records, column: str, nbytes: int, max_chars: int, progress: Callable[[int], None]
) -> Iterator[str]:
    """Texts sampled evenly from the documents, `max_chars` characters in total, or all of them.

    Documents contribute excerpts in turn, so that none dominates while others have text left.
    `nbytes` is the size of all documents; `progress` is called with the characters so far.
    """
    count = len(documents)
    budget = max_chars
    stride = min(max(nbytes // max_chars, 1), max(count, 1))
    excerpt = budget if nbytes <= max_chars else max(max_chars // max(count, 1), MIN_EXCERPT_CHARS)
    start, has_more = 0, True
    while has_more:
        has_more = False
        for index in (index for first in range(stride) for index in range(first, count, stride)):
            text = documents[index][column]
            if not isinstance(text, str):
                raise ConfigError(
                    f"column {column!r} has {type(text).__name__} instead of text: "
                    "name another column"
                )
            has_more |= len(text) > start + excerpt
            part = replace_surrogates(text[start : start + min(excerpt, budget)])
            budget -= len(part)
            if part:
                progress(max_chars - budget)
                yield part
            if budget == 0:
                return
        start += excerpt


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> int:
    """Train byte-level BPE; write tokenizer.json and tokenizer_config.json to the folder `out`.

    Returns the size of the vocabulary, which is smaller than `vocab_size` if the text is short.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, 1)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    write_text(out / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True))
    return tokenizer.get_vocab_size()


def train_sentencepiece(texts: Iterable[str], vocab_size: int, out: Path, model_type: str) -> int:
    """Train a SentencePiece model (`model_type`: unigram or bpe) and write it to the file `out`.

    Returns the size of the vocabulary. Raises ConfigError if the text is too short for it.
    """
    library = require("sentencepiece", "training a SentencePiece tokenizer")
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=split_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            num_threads=NUM_THREADS,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * MAX_LINE_CHARS,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        # After " Increase" the message names options that this function does not have.
        reason = str(error).rpartition("] ")[2].partition(" Increase")[0]
        raise ConfigError(
            f"a vocabulary of {vocab_size} cannot be trained on this text: {reason}"
        ) from error
    with atomic_writer(out, "wb") as file:
        file.write(model.getvalue())
    return library.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


def split_lines(texts: Iterable[str]) -> Iterator[str]:
    """SentencePiece trains on lines of at most MAX_LINE_CHARS characters."""
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), MAX_LINE_CHARS):
                yield line[start : start + MAX_LINE_CHARS]
