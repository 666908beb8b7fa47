"""`maxtext data inspect`: the batches that training would see, decoded, and how well their rows are
filled.
"""

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
from maxtext.cli.data import settled, take_number
from maxtext.cli.models import aligned
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig

BATCHES, ROWS = 1, 4  # read, and shown of each
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
# What moves the cursor, changes colours or turns the direction of a line; line ends and tabs are
# welcome.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
TOKEN_SOURCES = ("synthetic", "olmo_grain")  # that need no tokenizer

Row = list[tuple[np.ndarray, np.ndarray]]  # inputs and targets of its segments


@dataclass
class Counted:
    """What the batches amount to. `end`: the token that ends each document, where truncation shows
    by its absence.
    """

    end: int | None
    batches: int = 0
    rows: int = 0
    places: int = 0
    cut: int = 0
    segments: list[int] = field(default_factory=list)  # in each row that has some
    lengths: list[int] = field(default_factory=list)  # of each segment
    seconds: list[float] = field(default_factory=list)  # until each batch was there
    first_tokens: int = 0

    def add(self, batch: dict[str, np.ndarray], seconds: float) -> None:
        numbers = batch["inputs_segmentation"]
        lengths = [np.bincount(row)[1:] for row in numbers]
        self.batches += 1
        self.rows += len(numbers)
        self.places += numbers.size
        self.segments += [len(row) for row in lengths if len(row)]
        self.lengths += [int(length) for row in lengths for length in row]
        self.seconds.append(seconds)
        if self.batches == 1:
            self.first_tokens = sum(self.lengths)
        if self.end is not None:
            full = np.array([row.max(initial=0) == numbers.shape[1] for row in lengths])
            self.cut += int((full & (batch["targets"][:, -1] != self.end)).sum())

    def summary(self, documents: int | None) -> dict[str, Any]:
        """The numbers of the table. The first batch, which waits for files to be opened, has no
        part in the speed.
        """
        tokens, sequences = sum(self.lengths), max(len(self.lengths), 1)
        lengths, segments = np.array(self.lengths or [0]), np.array(self.segments or [0])
        found: dict[str, Any] = {} if documents is None else {"documents": documents}
        found |= {
            "batches": self.batches,
            "rows": self.rows,
            "tokens": tokens,
            "packing_efficiency": tokens / max(self.places, 1),
            "segments_a_row": {"mean": float(segments.mean()), "most": int(segments.max())},
            "length": {
                "mean": float(lengths.mean()),
                "median": float(np.median(lengths)),
                "longest": int(lengths.max()),
            },
        }
        if self.end is not None:
            found["truncated"] = self.cut / sequences
        if self.seconds:
            found["first_batch_seconds"] = self.seconds[0]
        if len(self.seconds) > 1:
            found["tokens_a_second"] = (tokens - self.first_tokens) / max(
                sum(self.seconds[1:]), 1e-9
            )
        return found


class Reader:
    """Tokens as text, with special tokens by their names."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.is_special = lru_cache(None)(self.has_only_a_name)

    def has_only_a_name(self, token: int) -> bool:
        if token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            return True
        # A space at the beginning is left out by decoding, too, but is no special token.
        return not self.tokenizer.decode([token]) and bool(
            self.tokenizer.id_to_token(token).strip("▁ ")
        )

    def parts(self, tokens: np.ndarray) -> Iterator[tuple[str, bool]]:
        """(text, whether it is the name of a special token)."""
        for special, together in groupby(tokens.tolist(), self.is_special):
            if special:
                yield from ((self.tokenizer.id_to_token(token), True) for token in together)
            else:
                yield self.tokenizer.decode(list(together)), False


class Numbers:
    """Tokens as their ids, for data that nobody said how to decode."""

    def parts(self, tokens: np.ndarray) -> Iterator[tuple[str, bool]]:
        yield " ".join(map(str, tokens.tolist())), False


def run(args: list[str]) -> int:
    as_json = arguments.take_flag(args, "--json")
    evaluation = arguments.take_flag(args, "--eval")
    batches = take_number(args, "--batches", least=1) or BATCHES
    rows = take_number(args, "--rows", least=0)
    config = settled(args)
    tokenized = config.dataset_type.value not in TOKEN_SOURCES and (
        config.tokenize_eval_data if evaluation else config.tokenize_train_data
    )
    reader = reader_of(config, tokenized)
    counted = Counted(
        reader.tokenizer.eos_id
        if isinstance(reader, Reader) and shows_cuts(config, tokenized)
        else None
    )
    shown, documents = read(config, evaluation, batches, ROWS if rows is None else rows, counted)
    summary = counted.summary(documents)
    if as_json:
        print(
            json.dumps(
                {
                    "batches": [list(map(reader_data(reader), batch)) for batch in shown],
                    "summary": summary,
                }
            )
        )
    else:
        show(shown, reader, config.max_target_length, summary)
    return 0


def reader_of(config: MaxTextConfig, tokenized: bool) -> Reader | Numbers:
    """Data that is tokens already is decoded by a tokenizer that the user names; what is only known
    to have come with the model would have to be fetched first."""
    from maxtext.tokenizers import load_tokenizer

    named = config.tokenizer_path and config.source("tokenizer_path").kind != "derived"
    return Reader(load_tokenizer(config)) if tokenized or named else Numbers()


def shows_cuts(config: MaxTextConfig, tokenized: bool) -> bool:
    """Whether a document that was cut fills a row and lacks its last token, and no other does."""
    splits = config.packing and config.grain_packing_type == "concat_then_split"
    ends = tokenized and config.add_eos and not config.use_chat_template
    return (
        config.use_truncation and ends and not splits and config.dataset_type.value != "c4_mlperf"
    )


def read(
    config: MaxTextConfig, evaluation: bool, batches: int, rows: int, counted: Counted
) -> tuple[list[list[Row]], int | None]:
    """The first rows of each batch, and how many documents the data has, if that is known."""
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams
    from maxtext.trainers.batch_size import batch_size_at, batch_sizes

    start = time.perf_counter()
    # Workers do not change the batches, and take longer to start than most looks at the data take.
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
            "--eval: the configuration names no evaluation data, set the key for it or leave --eval out"
        )
    shown = []
    try:
        while counted.batches < batches and (batch := next(iterator, None)) is not None:
            counted.add(batch, time.perf_counter() - start)
            shown.append([segments(batch, row) for row in range(min(rows, len(batch["inputs"])))])
            start = time.perf_counter()
        stream = next(iter(iterator.get_state()["streams"].values()))
        documents = stream["source"].get("made_by", {}).get("documents")
    finally:
        iterator.close()
    return shown, documents


def segments(batch: dict[str, np.ndarray], row: int) -> Row:
    inputs, targets, numbers = (
        batch[name][row] for name in ("inputs", "targets", "inputs_segmentation")
    )
    return [
        (inputs[numbers == number], targets[numbers == number])
        for number in range(1, int(numbers.max()) + 1)
    ]


def sequence(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """All tokens of a segment: targets are its inputs one place on, and the last of them is
    nobody's input.
    """
    return np.append(inputs, targets[-1:])


def reader_data(reader: Reader | Numbers) -> Any:
    """A row for another program."""

    def data(row: Row) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for inputs, targets in row:
            found.append({"inputs": inputs.tolist(), "targets": targets.tolist()})
            if isinstance(reader, Reader):
                found[-1]["text"] = "".join(
                    text for text, _ in reader.parts(sequence(inputs, targets))
                )
        return found

    return data


# The terminal.


def visible(text: str) -> str:
    """The same text with control characters as Python writes them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def show(
    shown: list[list[Row]], reader: Reader | Numbers, length: int, summary: dict[str, Any]
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for at, batch in enumerate(shown):
        for number, row in enumerate(batch):
            used = sum(len(inputs) for inputs, _ in row)
            count = f"{len(row)} segment{'s' if len(row) != 1 else ''}"
            console.print(
                f"batch {at}, row {number}: {count}, {used} of {length} places", style="bold"
            )
            for place, segment in enumerate(row):
                line = Text()
                for text, special in reader.parts(sequence(*segment)):
                    colour = COLOURS[place % len(COLOURS)]
                    line.append(
                        visible(text), style=f"bold reverse {colour}" if special else colour
                    )
                for first, part in enumerate(line.split("\n", allow_blank=True)):
                    console.print(
                        Text(f"{place + 1 if not first else '':>4} │ ", style="dim"), part, sep=""
                    )
            if used < length:
                console.print(f"     · {length - used} places of padding", style="dim")
    console.print(aligned(table(summary), left=1), end="")


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    segments_a_row, length = summary["segments_a_row"], summary["length"]
    rows = [("documents", f"{summary['documents']:,}")] if "documents" in summary else []
    rows += [
        ("batches", f"{summary['batches']:,}"),
        ("rows", f"{summary['rows']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("packing efficiency", f"{summary['packing_efficiency']:.2%}"),
        ("segments a row, mean", f"{segments_a_row['mean']:.2f}"),
        ("segments a row, most", f"{segments_a_row['most']:,}"),
        ("tokens a segment, mean", f"{length['mean']:.1f}"),
        ("tokens a segment, median", f"{length['median']:.1f}"),
        ("tokens a segment, longest", f"{length['longest']:,}"),
    ]
    if "truncated" in summary:
        rows.append(("truncated documents", f"{summary['truncated']:.2%}"))
    rows.append(("first batch", f"{summary['first_batch_seconds']:.3f} s"))
    if "tokens_a_second" in summary:
        rows.append(("tokens/s after it", f"{summary['tokens_a_second']:,.0f}"))
    return rows
