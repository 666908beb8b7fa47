"""`maxtext data inspect`: shows the batches of training, decoded, and statistics of packing."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from maxtext.cli import arguments
from maxtext.cli.data import load_config, take_number
from maxtext.cli.terminal import format_table
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig

BATCHES, ROWS = 1, 4  # default number of batches, and of rows of each to show
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
# Characters that move the cursor, change colours or the direction of a line; not newlines and tabs.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
TOKEN_SOURCES = ("synthetic", "olmo_grain")  # sources of token ids, which need no tokenizer

Row = list[tuple[np.ndarray, np.ndarray]]  # (inputs, targets) of each segment


@dataclass
class BatchStatistics:
    """Statistics of batches. `eos_id` is the last token of each document, whose absence reveals
    truncation; None if truncation cannot be detected.
    """

    eos_id: int | None
    batches: int = 0
    rows: int = 0
    positions: int = 0
    truncated: int = 0
    segments: list[int] = field(default_factory=list)  # number in each row that is not empty
    lengths: list[int] = field(default_factory=list)  # of each segment
    seconds: list[float] = field(default_factory=list)  # waited for each batch
    first_tokens: int = 0

    def add(self, batch: dict[str, np.ndarray], seconds: float) -> None:
        segment_ids = batch["inputs_segmentation"]
        lengths = [np.bincount(row)[1:] for row in segment_ids]
        self.batches += 1
        self.rows += len(segment_ids)
        self.positions += segment_ids.size
        self.segments += [len(row) for row in lengths if len(row)]
        self.lengths += [int(length) for row in lengths for length in row]
        self.seconds.append(seconds)
        if self.batches == 1:
            self.first_tokens = sum(self.lengths)
        if self.eos_id is not None:
            full = np.array([row.max(initial=0) == segment_ids.shape[1] for row in lengths])
            self.truncated += int((full & (batch["targets"][:, -1] != self.eos_id)).sum())

    def summary(self, documents: int | None) -> dict[str, Any]:
        """The statistics as JSON data. The speed excludes the first batch, which waits for files to
        be opened.
        """
        tokens, sequences = sum(self.lengths), max(len(self.lengths), 1)
        lengths, segments = np.array(self.lengths or [0]), np.array(self.segments or [0])
        summary: dict[str, Any] = {} if documents is None else {"documents": documents}
        summary |= {
            "batches": self.batches,
            "rows": self.rows,
            "tokens": tokens,
            "packing_efficiency": tokens / max(self.positions, 1),
            "segments_a_row": {"mean": float(segments.mean()), "most": int(segments.max())},
            "length": {
                "mean": float(lengths.mean()),
                "median": float(np.median(lengths)),
                "longest": int(lengths.max()),
            },
        }
        if self.eos_id is not None:
            summary["truncated"] = self.truncated / sequences
        if self.seconds:
            summary["first_batch_seconds"] = self.seconds[0]
        if len(self.seconds) > 1:
            summary["tokens_a_second"] = (tokens - self.first_tokens) / max(
                sum(self.seconds[1:]), 1e-9
            )
        return summary


class TextDecoder:
    """Decodes tokens to text; special tokens are shown by name."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.is_special = lru_cache(None)(self.is_special_token)

    def is_special_token(self, token: int) -> bool:
        if token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            return True
        # Decoding drops a leading space, too, but a space is not a special token.
        return not self.tokenizer.decode([token]) and bool(
            self.tokenizer.id_to_token(token).strip("▁ ")
        )

    def spans(self, tokens: np.ndarray) -> Iterator[tuple[str, bool]]:
        """(text, whether it is the name of a special token) of runs of tokens."""
        for special, run in groupby(tokens.tolist(), self.is_special):
            if special:
                yield from ((self.tokenizer.id_to_token(token), True) for token in run)
            else:
                yield self.tokenizer.decode(list(run)), False


class IdPrinter:
    """Shows token ids, for tokenized data whose tokenizer is not set."""

    def spans(self, tokens: np.ndarray) -> Iterator[tuple[str, bool]]:
        yield " ".join(map(str, tokens.tolist())), False


def run(args: list[str]) -> int:
    as_json = arguments.take_flag(args, "--json")
    evaluation = arguments.take_flag(args, "--eval")
    batches = take_number(args, "--batches", least=1) or BATCHES
    rows = take_number(args, "--rows", least=0)
    config = load_config(args)
    tokenized = config.dataset_type.value not in TOKEN_SOURCES and (
        config.tokenize_eval_data if evaluation else config.tokenize_train_data
    )
    decoder = decoder_of(config, tokenized)
    eos_id = None
    if isinstance(decoder, TextDecoder) and detects_truncation(config, tokenized):
        eos_id = decoder.tokenizer.eos_id
    statistics = BatchStatistics(eos_id)
    num_rows = ROWS if rows is None else rows
    shown, documents = read_batches(config, evaluation, batches, num_rows, statistics)
    summary = statistics.summary(documents)
    if as_json:
        print(
            json.dumps(
                {
                    "batches": [[row_data(row, decoder) for row in batch] for batch in shown],
                    "summary": summary,
                }
            )
        )
    else:
        show(shown, decoder, config.max_target_length, summary)
    return 0


def decoder_of(config: MaxTextConfig, tokenized: bool) -> TextDecoder | IdPrinter:
    """Tokenized data is decoded only if the user sets a tokenizer, since the one published with the
    model may have to be downloaded.
    """
    from maxtext.tokenizers import load_tokenizer

    named = config.tokenizer_path and config.source("tokenizer_path").kind != "derived"
    return TextDecoder(load_tokenizer(config)) if tokenized or named else IdPrinter()


def detects_truncation(config: MaxTextConfig, tokenized: bool) -> bool:
    """Whether exactly the truncated documents fill a row and lack the end token."""
    splits_documents = config.packing and config.grain_packing_type == "concat_then_split"
    has_eos = tokenized and config.add_eos and not config.use_chat_template
    return (
        config.use_truncation
        and has_eos
        and not splits_documents
        and config.dataset_type.value != "c4_mlperf"
    )


def read_batches(
    config: MaxTextConfig, evaluation: bool, batches: int, rows: int, statistics: BatchStatistics
) -> tuple[list[list[Row]], int | None]:
    """The first rows of each batch, and the number of documents in the data, if known."""
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams
    from maxtext.trainers.batch_size import batch_size_at, batch_sizes

    start = time.perf_counter()
    # Workers do not change the batches, and take longer to start than reading a few of them.
    config = config.model_copy(update={"grain_worker_count": 0, "grain_worker_count_eval": 0})
    if evaluation:
        size = config.global_batch_size_to_eval_on
        iterator = open_data_streams(config, Split.EVAL, lambda step: size, [size])
    else:
        iterator = open_data_streams(
            config, Split.TRAIN, partial(batch_size_at, config), batch_sizes(config)
        )
    if iterator is None:
        raise ConfigError(
            "--eval: the configuration has no evaluation data; set its key or leave --eval out"
        )
    shown = []
    try:
        while statistics.batches < batches and (batch := next(iterator, None)) is not None:
            statistics.add(batch, time.perf_counter() - start)
            shown.append([segments(batch, row) for row in range(min(rows, len(batch["inputs"])))])
            start = time.perf_counter()
        stream = next(iter(iterator.get_state()["streams"].values()))
        documents = stream["source"].get("made_by", {}).get("documents")
    finally:
        iterator.close()
    return shown, documents


def segments(batch: dict[str, np.ndarray], row: int) -> Row:
    inputs, targets, segment_ids = (
        batch[name][row] for name in ("inputs", "targets", "inputs_segmentation")
    )
    return [
        (inputs[segment_ids == segment], targets[segment_ids == segment])
        for segment in range(1, int(segment_ids.max()) + 1)
    ]


def sequence(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """All tokens of a segment: its inputs and the last target, since targets are inputs shifted by
    one.
    """
    return np.append(inputs, targets[-1:])


def row_data(row: Row, decoder: TextDecoder | IdPrinter) -> list[dict[str, Any]]:
    """A row as JSON data."""
    data: list[dict[str, Any]] = []
    for inputs, targets in row:
        data.append({"inputs": inputs.tolist(), "targets": targets.tolist()})
        if isinstance(decoder, TextDecoder):
            spans = decoder.spans(sequence(inputs, targets))
            data[-1]["text"] = "".join(text for text, _ in spans)
    return data


# The terminal.


def visible(text: str) -> str:
    """The text with control characters escaped as in Python."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def show(
    shown: list[list[Row]], decoder: TextDecoder | IdPrinter, length: int, summary: dict[str, Any]
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for batch_index, batch in enumerate(shown):
        for row_index, row in enumerate(batch):
            used = sum(len(inputs) for inputs, _ in row)
            count = f"{len(row)} segment{'s' if len(row) != 1 else ''}"
            console.print(
                f"batch {batch_index}, row {row_index}: {count}, {used} of {length} positions",
                style="bold",
            )
            for index, segment in enumerate(row):
                line = Text()
                for text, special in decoder.spans(sequence(*segment)):
                    colour = COLOURS[index % len(COLOURS)]
                    line.append(
                        visible(text), style=f"bold reverse {colour}" if special else colour
                    )
                for first, part in enumerate(line.split("\n", allow_blank=True)):
                    console.print(
                        Text(f"{index + 1 if not first else '':>4} │ ", style="dim"), part, sep=""
                    )
            if used < length:
                console.print(f"     · {length - used} positions of padding", style="dim")
    console.print(format_table(table(summary), left=1), end="")


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    segments_per_row, length = summary["segments_a_row"], summary["length"]
    rows = [("documents", f"{summary['documents']:,}")] if "documents" in summary else []
    rows += [
        ("batches", f"{summary['batches']:,}"),
        ("rows", f"{summary['rows']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("packing efficiency", f"{summary['packing_efficiency']:.2%}"),
        ("segments per row, mean", f"{segments_per_row['mean']:.2f}"),
        ("segments per row, max", f"{segments_per_row['most']:,}"),
        ("tokens per segment, mean", f"{length['mean']:.1f}"),
        ("tokens per segment, median", f"{length['median']:.1f}"),
        ("tokens per segment, max", f"{length['longest']:,}"),
    ]
    if "truncated" in summary:
        rows.append(("truncated documents", f"{summary['truncated']:.2%}"))
    rows.append(("first batch", f"{summary['first_batch_seconds']:.3f} s"))
    if "tokens_a_second" in summary:
        rows.append(("tokens/s after the first batch", f"{summary['tokens_a_second']:,.0f}"))
    return rows
