"""New vocabularies from text: byte-level BPE as a Hugging Face folder, or a SentencePiece model.

The same text gives the same vocabulary on every machine. All kinds have <pad>, <s>, </s> as ids 0,
1, 2, and a token for every byte, so that no text is unknown, and it comes back from its tokens as
it was (but for U+2581 through SentencePiece, which means a space there).
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from maxtext.common.errors import ConfigError
from maxtext.common.extras import require
from maxtext.common.files import atomic_writer, write_text
from maxtext.tokenizers.schemes import WORDS
from maxtext.tokenizers.text import valid

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SMALLEST = 256 + 4  # bytes, special tokens, and what SentencePiece calls unknown
LONGEST_LINE = 4096  # characters; SentencePiece leaves out longer lines, so they are cut
THREADS = 16  # of SentencePiece: the result depends on their number, so it is not the machine's
SHARE = 10_000  # characters of a document that are used at once, at least, where not all text is


class Records(Protocol):
    """Documents by number, each with columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def sample(
    documents: Records, column: str, nbytes: int, max_chars: int, progress: Callable[[int], None]
) -> Iterator[str]:
    """Texts from all over the documents, `max_chars` characters together; all, if they are no more
    than that.

    No document counts for more than its share while others have text left.
    """
    count, room = len(documents), max_chars
    step = min(max(nbytes // max_chars, 1), max(count, 1))
    share = room if nbytes <= max_chars else max(max_chars // max(count, 1), SHARE)
    start, longer = 0, True
    while longer:
        longer = False
        for index in (index for first in range(step) for index in range(first, count, step)):
            text = documents[index][column]
            if not isinstance(text, str):
                raise ConfigError(
                    f"column {column!r} has {type(text).__name__} instead of text: name another column"
                )
            longer |= len(text) > start + share
            part = valid(text[start : start + min(share, room)])
            room -= len(part)
            if part:
                progress(max_chars - room)
                yield part
            if room == 0:
                return
        start += share


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> int:
    """Byte-level BPE, written as tokenizer.json and tokenizer_config.json; returns the size it came
    to.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
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
    """`model_type`: unigram or bpe. Returns the size, which is the one asked for."""
    library = require("sentencepiece", "training a SentencePiece tokenizer")
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            num_threads=THREADS,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * LONGEST_LINE,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = (
            str(error).rpartition("] ")[2].partition(" Increase")[0]
        )  # then come options that are not ours
        raise ConfigError(
            f"a vocabulary of {vocab_size} cannot be made from this text: {reason}"
        ) from error
    with atomic_writer(out, "wb") as stream:
        stream.write(model.getvalue())
    return library.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


def lines(texts: Iterable[str]) -> Iterator[str]:
    """SentencePiece learns from lines."""
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), LONGEST_LINE):
                yield line[start : start + LONGEST_LINE]
