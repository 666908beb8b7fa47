"""`maxtext data inspect`: shows the batches of training, decoded, statistics of packing, and the
rows that cannot be used.
"""

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from maxtext.cli.arguments import Arguments
from maxtext.cli.batch_files import (
    IdPrinter,
    Row,
    TextDecoder,
    segment_text,
    segments,
    sides,
    visible,
)
from maxtext.cli.data import load_config
from maxtext.cli.terminal import format_table
from maxtext.common import log
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.input_pipeline import DataStreams, Split
    from maxtext.input_pipeline.bad_records import BadRecordList
    from maxtext.input_pipeline.encode import RecordEncoder
    from maxtext.input_pipeline.formats import BadRecord

TOKEN_SOURCES = ("synthetic", "olmo_grain")  # sources of token ids, which need no tokenizer
MAX_CHECKED = 10_000  # rows that are read to find bad ones, besides those of the batches


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
    trained_on: int = 0  # targets that the loss counts

    def add(self, batch: dict[str, np.ndarray], seconds: float) -> None:
        self.batches += 1
        self.rows += len(next(iter(batch.values())))
        self.seconds.append(seconds)
        for fields in sides(batch).values():
            self.add_rows(fields)
        if self.batches == 1:
            self.first_tokens = sum(self.lengths)

    def add_rows(self, batch: dict[str, np.ndarray]) -> None:
        segment_ids = batch["inputs_segmentation"]
        lengths = [np.bincount(row)[1:] for row in segment_ids]
        self.positions += segment_ids.size
        self.segments += [len(row) for row in lengths if len(row)]
        self.lengths += [int(length) for row in lengths for length in row]
        self.trained_on += int(np.count_nonzero(batch["targets_segmentation"]))
        if self.eos_id is not None:
            full = np.array([row.max(initial=0) == segment_ids.shape[1] for row in lengths])
            self.truncated += int((full & (batch["targets"][:, -1] != self.eos_id)).sum())

    def summary(self, documents: int | None) -> Json:
        """The statistics as JSON data. The speed excludes the first batch, which waits for files to
        be opened.
        """
        tokens, sequences = sum(self.lengths), max(len(self.lengths), 1)
        lengths, segments = np.array(self.lengths or [0]), np.array(self.segments or [0])
        summary: Json = {} if documents is None else {"documents": documents}
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


@dataclass
class Inspected:
    """The batches, rows and counts that `maxtext data inspect` shows. `checked` is the number of
    rows that were read to find bad ones; None if the source is read in order only.
    """

    shown: list[list[Row]]  # the first rows of each batch
    documents: int | None = None
    checked: int | None = None
    bad: "list[BadRecord]" = field(default_factory=list)
    reports: dict[str, tuple[int, str]] = field(default_factory=dict)
    too_little: str = ""  # why training would refuse the data


def run(arguments: Arguments) -> int:
    log.configure()
    evaluation = arguments["--eval"]
    config = load_config(arguments.all_args)
    tokenized = config.dataset_type.value not in TOKEN_SOURCES and (
        config.tokenize_eval_data if evaluation else config.tokenize_train_data
    )
    decoder = decoder_of(config, tokenized)
    eos_id = None
    if isinstance(decoder, TextDecoder) and detects_truncation(config, tokenized):
        eos_id = decoder.tokenizer.eos_id
    statistics = BatchStatistics(eos_id)
    inspected = inspect_data(
        config, evaluation, arguments["--batches"], arguments["--rows"], statistics
    )
    summary = statistics.summary(inspected.documents)
    if has_masks(config):
        summary["tokens_trained_on"] = statistics.trained_on
        summary["reports"] = [
            {"rows_that": remark, "rows": count, "first": example}
            for remark, (count, example) in inspected.reports.items()
        ]
    summary["bad_rows"] = [
        {"file": each.path, "location": each.location, "reason": each.reason}
        for each in inspected.bad
    ]
    if inspected.too_little:
        summary["too_little_data"] = inspected.too_little
    if arguments["--json"]:
        rows = [[row_data(row, decoder) for row in batch] for batch in inspected.shown]
        print(json.dumps({"batches": rows, "summary": summary}))
    else:
        show(inspected.shown, decoder, config.max_target_length, summary)
        print(describe_bad(inspected, config), end="")
    return int(exceeds_limit(inspected, config))


def exceeds_limit(inspected: Inspected, config: MaxTextConfig) -> bool:
    return 0 <= config.max_bad_records < len(inspected.bad)


def describe_bad(inspected: Inspected, config: MaxTextConfig) -> str:
    """Every bad row on a line of its own, after their number; empty if there are none."""
    if not inspected.bad:
        return ""
    total = "" if inspected.checked is None else f" among {inspected.checked:,} rows"
    effect = "stops at them" if exceeds_limit(inspected, config) else "skips them"
    lines = [
        f"bad rows: {len(inspected.bad):,}{total}; with max_bad_records={config.max_bad_records} "
        f"training {effect}",
        *(visible(str(error)) for error in inspected.bad),
    ]
    return "".join(f"{line}\n" for line in lines)


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
    is_document = not (config.use_chat_template or has_masks(config))
    has_eos = tokenized and config.add_eos and is_document
    return (
        config.use_truncation
        and has_eos
        and not splits_documents
        and config.dataset_type.value != "c4_mlperf"
    )


def inspect_data(
    config: MaxTextConfig, evaluation: bool, batches: int, rows: int, statistics: BatchStatistics
) -> Inspected:
    """Read `batches` batches, of which the first `rows` rows are shown, and look for bad rows. Data
    that does not fill a batch is padded. Raises ConfigError if there is no usable row.
    """
    from maxtext.input_pipeline import Split
    from maxtext.input_pipeline.bad_records import BadRecordList
    from maxtext.input_pipeline.encode_rows import TextEncoder
    from maxtext.input_pipeline.interface import TooLittleData

    # Workers do not change the batches, and take longer to start than reading a few of them.
    keys = {"grain_worker_count": 0, "grain_worker_count_eval": 0, "max_bad_records": -1}
    config = config.model_copy(update=keys)
    split = Split.EVAL if evaluation else Split.TRAIN
    if config.dataset_type.value in TOKEN_SOURCES:
        return read_batches(config, split, batches, rows, statistics)
    bad = BadRecordList()
    encoder = listing_encoder(config, split, bad)
    try:
        try:
            inspected = read_batches(config, split, batches, rows, statistics)
        except TooLittleData as error:
            LOGGER.warning("training would refuse this data: %s", error)
            config = config.model_copy(update={"generate_padding_batch_train": True})
            encoder = listing_encoder(config, split, bad)
            inspected = read_batches(config, split, batches, rows, statistics)
            inspected.shown = [[row for row in batch if row] for batch in inspected.shown]
            inspected.too_little = str(error)
        inspected.checked = check_rows(config, split, encoder, bad)
    except ConfigError as error:
        if not bad.errors:
            raise
        raise unusable_rows(bad.sorted(), error) from error
    inspected.bad = bad.sorted()
    if isinstance(encoder, TextEncoder):
        inspected.reports = encoder.reports.summary()
    return inspected


def unusable_rows(bad: "list[BadRecord]", error: ConfigError) -> ConfigError:
    """The error for data of which nothing is left. The traceback of the user's code comes alone."""
    failed = next((each for each in bad if each.details), None)
    if failed is None:
        return ConfigError(*map(str, bad), *error.problems)
    failure = ConfigError(str(failed))
    failure.details = failed.details
    return failure


def listing_encoder(config: MaxTextConfig, split: "Split", bad: "BadRecordList") -> "RecordEncoder":
    """The encoder of a configuration, with `bad` as the list of its bad records."""
    from maxtext.input_pipeline.row_formats import shared_encoder
    from maxtext.trainers.methods import method_of

    encoder = shared_encoder(config, split, method_of(config).row_format(config))
    encoder.bad_records = bad
    return encoder


def check_rows(
    config: MaxTextConfig, split: "Split", encoder: "RecordEncoder", bad: "BadRecordList"
) -> int | None:
    """Read the first MAX_CHECKED rows of the data, so that `bad` has the bad ones and `encoder` the
    remarks on the others. Returns how many were read, or None for a source that is read in order.
    """
    from maxtext.common import progress
    from maxtext.input_pipeline.load_documents import check_documents
    from maxtext.input_pipeline.sources import load_components
    from maxtext.trainers.methods import method_of

    components = load_components(config, split, method_of(config).row_format(config))
    checked = 0
    with progress.working("checking the rows of the data"):
        for component in components:
            left = MAX_CHECKED - checked
            checked += check_documents(component.documents, encoder, bad, left)
    return checked if components else None


def open_streams(config: MaxTextConfig, split: "Split") -> "DataStreams":
    from maxtext.input_pipeline import Split, open_data_streams
    from maxtext.trainers.methods import method_of

    method = method_of(config)
    sizes = method.batches.sizes_to_read(config)
    if split is Split.EVAL:
        sizes = [config.global_batch_size_to_eval_on]

    def rows(step: int) -> int:
        return sizes[0] if split is Split.EVAL else method.batches.rows_to_read(config, step)

    streams = open_data_streams(config, split, method.row_format(config), rows=rows, sizes=sizes)
    if streams is None:
        raise ConfigError(
            "--eval: the configuration has no evaluation data; set its key or leave --eval out"
        )
    return streams


def read_batches(
    config: MaxTextConfig, split: "Split", batches: int, rows: int, statistics: BatchStatistics
) -> Inspected:
    """The first rows of each batch, and the number of documents in the data if it is known."""
    start = time.perf_counter()
    streams = open_streams(config, split)
    inspected = Inspected(shown=[])
    masked = has_masks(config)
    try:
        while statistics.batches < batches and (batch := next(streams, None)) is not None:
            statistics.add(batch, time.perf_counter() - start)
            count = min(rows, len(next(iter(batch.values()))))
            inspected.shown.append([segments(batch, row, masked) for row in range(count)])
            start = time.perf_counter()
        position = next(iter(streams.get_state()["streams"].values()))
        inspected.documents = position["source"].get("made_by", {}).get("documents")
    finally:
        streams.close()
    return inspected


def has_masks(config: MaxTextConfig) -> bool:
    """Whether the data has rows with masks (and not random tokens in their place)."""
    from maxtext.trainers.methods import method_of

    row_format = method_of(config).row_format(config)
    return row_format.has_masks and config.dataset_type.value not in TOKEN_SOURCES


def row_data(row: Row, decoder: TextDecoder | IdPrinter) -> list[Json]:
    """A row as JSON data."""
    data: list[Json] = []
    for segment in row:
        data.append({"inputs": segment.inputs.tolist(), "targets": segment.targets.tolist()})
        if segment.side:
            data[-1]["side"] = segment.side
        if segment.loss_mask is not None:
            data[-1]["loss_mask"] = segment.loss_mask.astype(int).tolist()
        if isinstance(decoder, TextDecoder):
            data[-1]["text"] = "".join(text for text, _, _ in decoder.spans(segment))
    return data


# The terminal.


def show(
    shown: list[list[Row]], decoder: TextDecoder | IdPrinter, length: int, summary: Json
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for batch_index, batch in enumerate(shown):
        for row_index, row in enumerate(batch):
            used, positions = sum(len(segment.inputs) for segment in row), length
            count = f"{len(row)} segment{'s' if len(row) != 1 else ''}"
            if any(segment.side for segment in row):
                count, positions = "a pair", 2 * length
            console.print(
                f"batch {batch_index}, row {row_index}: {count}, {used} of {positions} positions",
                style="bold",
            )
            width = max((len(segment.side) for segment in row), default=0) or 4
            for index, segment in enumerate(row):
                label = segment.side or str(index + 1)
                line = segment_text(segment, decoder, index, is_plain=not console.is_terminal)
                for first, part in enumerate(line.split("\n", allow_blank=True)):
                    margin = f"{label if not first else '':>{width}} │ "
                    console.print(Text(margin, style="dim"), part, sep="")
            if used < positions:
                padding = f"{'':>{width}} · {positions - used} positions of padding"
                console.print(padding, style="dim")
    console.print(format_table(table(summary), left=1), end="")
    for report in summary.get("reports", ()):
        console.print(
            f"rows that {report['rows_that']}: {report['rows']:,}, first {report['first']}"
        )


def table(summary: Json) -> list[tuple[str, str]]:
    segments_per_row, length = summary["segments_a_row"], summary["length"]
    rows = [("documents", f"{summary['documents']:,}")] if "documents" in summary else []
    rows += [
        ("batches", f"{summary['batches']:,}"),
        ("rows", f"{summary['rows']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
    ]
    if "tokens_trained_on" in summary:
        rows.append(("tokens trained on", f"{summary['tokens_trained_on']:,}"))
    rows += [
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
