"""Tokens a second from files to batches, against `datasets` with a packing loop, and how full
best_fit packs rows.

    python benchmarks/data.py [--megabytes 128] [--repeats 3]

The corpus is made here: sources of Python's standard library and of the installed packages, cut
into documents whose lengths are log-normal, as those of web pages are (half of them below about 400
tokens, one in sixteen longer than a row of 2048), as Parquet and as JSON lines. The tokenizer is a
byte-level BPE of 16384 tokens, trained on a part of it; that is not counted. Every run reads all
documents once, tokenizes, packs, and makes batches of 8 x 2048 with positions and segments.

Ours: `dataset_type=grain` with best_fit, documents longer than a row go on in another, from as many
data streams as a training run has. In this process and in worker processes; the faster counts.
Peer: load_dataset, a batched map with the fast tokenizer of `transformers` on 1000 documents at a
time, an empty cache, and a loop in NumPy: cut wherever a row ends, or first fit, whichever is
faster. With one process and with one for each core; the faster counts.

Each run is a process of its own, its imports not counted, but those of the workers are. Ours and
the peer's take turns, and medians count, so that other work on the machine hits both. Cores:
processor seconds by seconds, and how many times ours the peer's processor seconds are is given
besides. Prints one JSON line.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, ROWS, VOCABULARY = 2048, 8, 16384
MEDIAN, SPREAD = 1400, 1.1  # of the log-normal lengths, in characters
FILES, ROW_GROUP = 4, 500
# In no text of the corpus: the peer would take them for the tokens, ours for text
BEGIN, END = "<|begin-of-document|>", "<|end-of-document|>"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Rows that the peer's first fit fills at a time, as many as ours
OPEN_ROWS = 64


def documents(megabytes: int) -> list[str]:
    """Pieces of whole lines, from source files in any order."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    paths = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    generator = np.random.default_rng(0)
    texts, left = [], megabytes * 10**6
    for number in generator.permutation(len(paths)):
        texts.append(paths[number].read_text(encoding="utf-8", errors="replace"))
        left -= len(texts[-1])
        if left <= 0:
            break
    text = "".join(texts)
    texts, start = [], 0
    while start < len(text):
        end = text.find("\n", start + int(generator.lognormal(np.log(MEDIAN), SPREAD))) + 1 or len(
            text
        )
        texts.append(text[start:end])
        start = end
    return [texts[index] for index in generator.permutation(len(texts))]


def write(folder: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    for kind in ("parquet", "jsonl"):
        (folder / kind).mkdir()
    for number in range(FILES):
        part = texts[number::FILES]
        table = pyarrow.table({"text": part})
        parquet.write_table(table, folder / f"parquet/{number}.parquet", row_group_size=ROW_GROUP)
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in part)
        (folder / f"jsonl/{number}.jsonl").write_text(lines, encoding="utf-8")


def train_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[: len(texts) // 6], trainer)
    # The peer's documents begin and end as ours do.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, 0), (END, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BEGIN, "eos_token": END})
    )


def processor_seconds() -> float:
    """Of this process and those it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def counted(segmentations: Iterable[np.ndarray]) -> dict[str, int]:
    """How many tokens and rows batches hold, from their segments."""
    tokens = rows = 0
    for segmentation in segmentations:
        tokens += int(np.count_nonzero(segmentation))
        rows += int(np.count_nonzero(segmentation[:, 0]))
    return {"tokens": tokens, "rows": rows}


def run_maxtext(folder: Path, kind: str, workers: int) -> dict[str, Any]:
    from maxtext.input_pipeline import Split, grain_source, open_data_streams
    from maxtext.input_pipeline.row_formats import DOCUMENTS
    from maxtext.models.configuration import load

    assert grain_source  # imported now, not when it is first used
    overrides = [
        "run_name=data", "dataset_type=grain", f"grain_file_type={kind}",
        f"grain_train_files={folder / kind}", "tokenizer_type=huggingface",
        f"tokenizer_path={folder}", f"vocab_size={VOCABULARY}", "use_truncation=false",
        f"max_target_length={LENGTH}", f"per_device_batch_size={ROWS}",
        "grain_packing_type=best_fit", f"grain_worker_count={workers}",
        "generate_padding_batch_train=true",
    ]  # fmt: skip
    config = load(None, overrides, environ={})
    begin, used = time.perf_counter(), processor_seconds()
    batches = open_data_streams(config, Split.TRAIN, DOCUMENTS, lambda step: ROWS, [ROWS])
    assert batches is not None, "a source has training data, or says what is missing"
    counts = counted(batch["targets_segmentation"] for batch in batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return {"seconds": seconds, "processor": processor_seconds() - used, **counts}


def peer(folder: Path, kind: str, processes: int) -> dict[str, Any]:
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    several = processes if processes > 1 else None
    with tempfile.TemporaryDirectory() as cache:
        begin, used = time.perf_counter(), processor_seconds()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

        def tokenize(batch: dict[str, list[str]]) -> Any:
            return tokenizer(
                batch["text"], return_attention_mask=False, return_token_type_ids=False
            )

        dataset = datasets.load_dataset(
            {"jsonl": "json"}.get(kind, kind),
            data_files=sorted(map(str, (folder / kind).iterdir())), split="train",
            cache_dir=cache, num_proc=several,
        )  # fmt: skip
        dataset = dataset.map(
            tokenize, batched=True, batch_size=1000, remove_columns=["text"], num_proc=several
        )
        dataset = dataset.with_format("numpy")
        seconds, processor = time.perf_counter() - begin, processor_seconds() - used
        results = []
        for pack in (concatenated, first_fit):
            begin, used = time.perf_counter(), processor_seconds()
            packed = pack(batch["input_ids"] for batch in dataset.iter(1000))
            counts = counted(batch["segmentation"] for batch in packed)
            times = (seconds + time.perf_counter() - begin, processor + processor_seconds() - used)
            results.append(
                {"seconds": times[0], "processor": times[1], "packing": pack.__name__, **counts}
            )
        pairs = sum(
            len(tokens) - 1 for batch in dataset.iter(1000) for tokens in batch["input_ids"]
        )
    return min(results, key=lambda result: result["seconds"]) | {"pairs": pairs}


def concatenated(chunks: Iterable[list[np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Documents one after the other, cut wherever a row ends."""
    size = ROWS * LENGTH
    left = np.zeros((3, 0), np.int32)
    last = 0
    for chunk in chunks:
        lengths = np.array([len(tokens) for tokens in chunk])
        starts = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        number = np.repeat(np.arange(last, last + len(chunk)), lengths)
        last += len(chunk)
        fields = np.concatenate(
            [left, np.stack([np.concatenate(chunk), position, number]).astype(np.int32)], axis=1
        )
        whole = (fields.shape[1] - 1) // size
        for at in range(0, whole * size, size):
            tokens, position, number = fields[:, at : at + size].reshape(3, ROWS, LENGTH)
            targets = fields[0, at + 1 : at + size + 1].reshape(ROWS, LENGTH)
            segmentation = number - number[:, :1] + 1
            yield {
                "inputs": tokens,
                "targets": targets,
                "position": position,
                "segmentation": segmentation,
            }
        left = fields[:, whole * size :]


def first_fit(chunks: Iterable[list[np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Each document in the first row that has room; longer ones go on in another row."""
    names = ("inputs", "targets", "position", "segmentation")
    counting = np.arange(LENGTH, dtype=np.int32)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        filled = int(np.count_nonzero(segments))
        for start in range(0, filled, ROWS):
            yield {name: rows[name][start : min(start + ROWS, filled)] for name in names}

    def empty() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        rows = {name: np.zeros((OPEN_ROWS, LENGTH), np.int32) for name in names}
        return rows, np.full(OPEN_ROWS, LENGTH), np.zeros(OPEN_ROWS, np.int32)

    rows, free, segments = empty()
    for tokens in (tokens for chunk in chunks for tokens in chunk):
        for begin in range(0, len(tokens) - 1, LENGTH):
            piece = tokens[begin : begin + LENGTH + 1]
            size = len(piece) - 1
            row = int(np.argmax(free >= size))
            if free[row] < size:
                yield from batches()
                rows, free, segments = empty()
                row = 0
            index = slice(LENGTH - free[row], LENGTH - free[row] + size)
            free[row] -= size
            segments[row] += 1
            rows["inputs"][row, index], rows["targets"][row, index] = piece[:-1], piece[1:]
            rows["position"][row, index], rows["segmentation"][row, index] = (
                counting[:size],
                segments[row],
            )
    yield from batches()


def measure(side: str, folder: Path, kind: str, processes: int) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--run", side, str(folder), kind, str(processes)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def best(runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """The median run of the number of processes whose median is fastest."""

    def seconds(run: dict[str, Any]) -> float:
        return run["seconds"]

    medians = [
        sorted(several, key=seconds)[len(several) // 2] | {"processes": at}
        for at, several in runs.items()
    ]
    return min(medians, key=seconds)


def compare(folder: Path, kind: str, repeats: int) -> dict[str, Any]:
    runs: dict[Any, dict[int, list]] = {run_maxtext: {0: [], CORES: []}, peer: {1: [], CORES: []}}
    for _ in range(repeats):
        for side, several in runs.items():
            for processes, results in several.items():
                results.append(measure(side.__name__, folder, kind, processes))
    we, they = best(runs[run_maxtext]), best(runs[peer])
    # Of each document all tokens but the last are inputs: one way to know that both had the same
    # tokens, and all.
    if we["tokens"] != they["pairs"]:
        raise SystemExit(
            f"{kind}: we packed {we['tokens']} tokens, but the peer's tokenizer gave "
            f"{they['pairs']}"
        )

    def shown(run: dict[str, Any]) -> dict[str, Any]:
        return {
            "tokens_per_second": round(we["tokens"] / run["seconds"]),
            "processes": run["processes"],
            "cores": round(run["processor"] / run["seconds"], 2),
        }

    return {
        "ours": shown(we),
        "peer": shown(they) | {"packing": they["packing"]},
        "ratio": round(they["seconds"] / we["seconds"], 2),
        "processor_ratio": round(they["processor"] / we["processor"], 2),
        "packing_efficiency": round(we["tokens"] / (we["rows"] * LENGTH), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        side, folder, kind, processes = arguments.run
        print(
            json.dumps(
                {"ours": run_maxtext, "peer": peer}[side](Path(folder), kind, int(processes))
            )
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = documents(arguments.megabytes)
        write(folder, texts)
        train_tokenizer(folder, texts)
        result = {kind: compare(folder, kind, arguments.repeats) for kind in ("parquet", "jsonl")}
    print(json.dumps({"documents": len(texts), "megabytes": arguments.megabytes, **result}))


if __name__ == "__main__":
    main()
