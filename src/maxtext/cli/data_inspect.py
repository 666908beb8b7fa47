"""`maxtext data inspect`: shows the batches of training, decoded, and statistics of packing."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxtext.cli.arguments import Arguments
from maxtext.cli.batch_files import IdPrinter, Row, TextDecoder, segment_text, segments, sides
from maxtext.cli.data import load_config
from maxtext.cli.terminal import format_table
from maxtext.common import log
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig

TOKEN_SOURCES = ("synthetic", "olmo_grain")  # sources of token ids, which need no tokenizer


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
    learned: int = 0  # targets that the loss counts

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
        self.learned += int(np.count_nonzero(batch["targets_segmentation"]))
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


def run(arguments: Arguments) -> int:
    log.configure()
    evaluation = arguments["--eval"]
    config = load_config(arguments.all_words)
    tokenized = config.dataset_type.value not in TOKEN_SOURCES and (
        config.tokenize_eval_data if evaluation else config.tokenize_train_data
    )
    decoder = decoder_of(config, tokenized)
    eos_id = None
    if isinstance(decoder, TextDecoder) and detects_truncation(config, tokenized):
        eos_id = decoder.tokenizer.eos_id
    statistics = BatchStatistics(eos_id)
    shown, documents, reports = read_batches(
        config, evaluation, arguments["--batches"], arguments["--rows"], statistics
    )
    summary = statistics.summary(documents)
    if has_masks(config):
        summary["learned_tokens"] = statistics.learned
        summary["reports"] = [
            {"rows_that": remark, "rows": count, "first": example}
            for remark, (count, example) in reports.items()
        ]
    if arguments["--json"]:
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
    is_document = not (config.use_chat_template or has_masks(config))
    has_eos = tokenized and config.add_eos and is_document
    return (
        config.use_truncation
        and has_eos
        and not splits_documents
        and config.dataset_type.value != "c4_mlperf"
    )


def read_batches(
    config: MaxTextConfig, evaluation: bool, batches: int, rows: int, statistics: BatchStatistics
) -> tuple[list[list[Row]], int | None, dict[str, tuple[int, str]]]:
    """The first rows of each batch, the number of documents in the data if known, and the reports
    on rows of fine-tuning.
    """
    from functools import partial

    from maxtext.input_pipeline import Split, open_data_streams
    from maxtext.input_pipeline.encode import shared_encoder
    from maxtext.input_pipeline.encode_rows import TextEncoder
    from maxtext.trainers.methods import method_of

    start = time.perf_counter()
    # Workers do not change the batches, and take longer to start than reading a few of them.
    config = config.model_copy(update={"grain_worker_count": 0, "grain_worker_count_eval": 0})
    split = Split.EVAL if evaluation else Split.TRAIN
    method = method_of(config)
    row_format = method.row_format(config)
    encoder = shared_encoder(config, split, row_format) if has_masks(config) else None
    if evaluation:
        size = config.global_batch_size_to_eval_on
        iterator = open_data_streams(config, Split.EVAL, row_format, lambda step: size, [size])
    else:
        iterator = open_data_streams(
            config,
            Split.TRAIN,
            row_format,
            rows=partial(method.batches.rows_to_read, config),
            sizes=method.batches.sizes_to_read(config),
        )
    if iterator is None:
        raise ConfigError(
            "--eval: the configuration has no evaluation data; set its key or leave --eval out"
        )
    shown = []
    try:
        while statistics.batches < batches and (batch := next(iterator, None)) is not None:
            statistics.add(batch, time.perf_counter() - start)
            count = min(rows, len(next(iter(batch.values()))))
            masked = has_masks(config)
            shown.append([segments(batch, row, masked) for row in range(count)])
            start = time.perf_counter()
        stream = next(iter(iterator.get_state()["streams"].values()))
        documents = stream["source"].get("made_by", {}).get("documents")
    finally:
        iterator.close()
    reports = encoder.reports.summary() if isinstance(encoder, TextEncoder) else {}
    return shown, documents, reports


def has_masks(config: MaxTextConfig) -> bool:
    """Whether the data has rows with masks (and not random tokens in their place)."""
    from maxtext.trainers.methods import method_of

    row_format = method_of(config).row_format(config)
    return row_format.has_masks and config.dataset_type.value not in TOKEN_SOURCES


def row_data(row: Row, decoder: TextDecoder | IdPrinter) -> list[dict[str, Any]]:
    """A row as JSON data."""
    data: list[dict[str, Any]] = []
    for segment in row:
        data.append({"inputs": segment.inputs.tolist(), "targets": segment.targets.tolist()})
        if segment.side:
            data[-1]["side"] = segment.side
        if segment.learned is not None:
            data[-1]["learned"] = segment.learned.astype(int).tolist()
        if isinstance(decoder, TextDecoder):
            data[-1]["text"] = "".join(text for text, _, _ in decoder.spans(segment))
    return data


# The terminal.


def show(
    shown: list[list[Row]], decoder: TextDecoder | IdPrinter, length: int, summary: dict[str, Any]
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


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    segments_per_row, length = summary["segments_a_row"], summary["length"]
    rows = [("documents", f"{summary['documents']:,}")] if "documents" in summary else []
    rows += [
        ("batches", f"{summary['batches']:,}"),
        ("rows", f"{summary['rows']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
    ]
    if "learned_tokens" in summary:
        rows.append(("learned tokens", f"{summary['learned_tokens']:,}"))
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
