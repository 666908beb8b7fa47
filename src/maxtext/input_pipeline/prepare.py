"""Tokenizes documents once, to train from many times: ArrayRecord files of token ids and a
manifest.json.

A shard is a fixed range of documents. A record has the tokens of one document with its special
tokens, as the list `tokens` of a tf.train.Example. Empty documents and bad ones have no record. The
manifest names the input files, the settings and the finished shards. The same call resumes an
interrupted run: finished shards stay, the others are written again, and the bytes are those of an
uninterrupted run.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import write_text
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.bad_records import BadRecords
from maxtext.input_pipeline.encode import Encoder, data_columns
from maxtext.input_pipeline.formats import RecordSource, find_files, open_files
from maxtext.input_pipeline.grain_source import file_type, parse_mixture
from maxtext.input_pipeline.interface import Split
from maxtext.input_pipeline.load_documents import documents_per_chunk
from maxtext.input_pipeline.row_formats import RowFormat
from maxtext.input_pipeline.write_shards import (
    COLUMN,
    SUFFIX,
    Counts,
    Job,
    Shard,
    temporary,
    write_errors,
    write_shards,
)
from maxtext.tokenizers import Tokenizer

MANIFEST = "manifest.json"
FORMAT = "maxtext tokens 1"
SHARDS = 256  # approximate number, within these sizes in bytes of documents
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 4 * 2**20, 256 * 2**20
# Between two writes of the manifest: a shard that it does not list yet is written again
SAVE_SECONDS = 2.0
LOCK_SECONDS = 10.0  # until the workers of a killed run have ended
SPECIAL_CHARACTERS = ",;*?["  # in grain_train_files

# (documents done, all documents, tokens of this run); the first call has 0 tokens
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class PreparePlan:
    """The shards to write, and their inputs."""

    files: list[str]
    documents: RecordSource
    encoder: Encoder
    shards: list[Shard]
    settings: Json
    inputs: dict[str, list[int]]  # file -> [size in bytes, modification time in nanoseconds]


@dataclass
class Manifest:
    path: Path
    settings: Json
    inputs: dict[str, list[int]]
    finished: dict[str, Counts] = field(default_factory=dict)
    saved: float = 0.0

    def save(self) -> None:
        # Sorted by name and without timestamps, so that equal runs write equal bytes.
        finished = {name: asdict(self.finished[name]) for name in sorted(self.finished)}
        content = {
            "format": FORMAT,
            "settings": self.settings,
            "inputs": self.inputs,
            "shards": finished,
        }
        with write_errors(self.path):
            write_text(self.path, json.dumps(content, indent=1) + "\n")
        self.saved = time.monotonic()


@dataclass(frozen=True)
class Prepared:
    """`counts` are those of all shards, `tokens` and `seconds` those of this run."""

    counts: Counts
    shards: int
    tokens: int
    seconds: float


def prepare(
    config: MaxTextConfig,
    row_format: RowFormat,
    out: Path,
    shard_documents: int | None,
    workers: int,
    progress: Progress | None = None,
) -> Prepared:
    """Write the shards of the training documents, or finish an interrupted run. Raises ConfigError
    before `out` changes.
    """
    check_output(out)
    work = plan(config, row_format, shard_documents)
    with locked(out) as lock:
        manifest = resume_manifest(out, work)
        clean(out, work, manifest)
        manifest.save()
        start = time.perf_counter()
        try:
            tokens = run(config, out, work, manifest, workers, lock, progress)
        finally:
            seconds = time.perf_counter() - start
            clean(out, work, manifest)
            manifest.save()
    if inputs_of(work.files) != work.inputs:
        raise UserError(
            f"{changed(work.inputs, inputs_of(work.files))} while it was read: choose another --out"
        )
    counts = total(manifest)
    if not counts.records:
        raise UserError(
            f"none of the {counts.documents} documents has tokens to write: look at {work.files[0]}"
        )
    return Prepared(counts, len(work.shards), tokens, seconds)


def training_overrides(out: Path) -> list[str]:
    """The command-line overrides that train from the written shards."""
    return [
        "dataset_type=grain",
        "grain_file_type=arrayrecord",
        f"grain_train_files={out}/*{SUFFIX}",
        f"train_data_columns=[{COLUMN}]",
        "tokenize_train_data=false",
    ]


def run(
    config: MaxTextConfig,
    out: Path,
    work: PreparePlan,
    manifest: Manifest,
    workers: int,
    lock: int,
    progress: Progress | None,
) -> int:
    """Write the shards that are not finished, and return the number of tokens written."""
    todo = [shard for shard in work.shards if shard.name not in manifest.finished]
    before = total(manifest)
    bad = BadRecords(config.max_bad_records, before.bad)
    done, tokens = before.documents, 0
    if progress:
        progress(done, len(work.documents), tokens)
    job = Job(work.documents, work.encoder, str(out), documents_per_chunk(work.documents))
    # Closed when it is left early: its processes must have ended before anything is removed.
    with contextlib.closing(write_shards(job, todo, min(workers, len(todo)), lock)) as steps:
        for step in steps:
            bad.add(step.bad)
            done, tokens = done + step.documents, tokens + step.tokens
            if step.finished is not None:
                manifest.finished[step.shard.name] = step.finished
                if time.monotonic() - manifest.saved > SAVE_SECONDS:
                    manifest.save()
            if progress:
                progress(done, len(work.documents), tokens)
    return tokens


def total(manifest: Manifest) -> Counts:
    return sum(manifest.finished.values(), Counts())


def plan(config: MaxTextConfig, row_format: RowFormat, shard_documents: int | None) -> PreparePlan:
    """The plan of a run, which depends on the files and settings only, not on the machine."""
    if not config.tokenize_train_data:
        raise ConfigError(
            "tokenize_train_data=false: these documents are tokens already, train from them as "
            "they are"
        )
    encoder = Encoder(config, Split.TRAIN)
    assert encoder.tokenizer is not None, "tokenize_train_data is set"
    files, documents = open_documents(config, row_format)
    inputs = inputs_of(files)
    count, nbytes = len(documents), max(documents.nbytes, 1)
    size = min(max(nbytes // SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    shard_size = shard_documents or max(size * count // nbytes, 1)
    number = -(-count // shard_size)
    width = max(len(str(number)), 5)
    shards = [
        Shard(
            f"tokens-{at:0{width}}-of-{number:0{width}}{SUFFIX}",
            at * shard_size,
            min((at + 1) * shard_size, count),
        )
        for at in range(number)
    ]
    kind_key = "grain_file_type" if config.dataset_type.value == "grain" else "hf_path"
    settings = {
        "dataset_type": config.dataset_type.value,
        kind_key: getattr(config, kind_key),
        "train_data_columns": encoder.columns,
        "tokenizer": identity(encoder.tokenizer),
        "beginning": encoder.before.tolist(),
        "end": encoder.after.tolist(),
        "chat_template": encoder.template.source if encoder.template else None,
        "documents": count,
        "shard_documents": shard_size,
    }
    return PreparePlan(files, documents, encoder, shards, settings, inputs)


def open_documents(config: MaxTextConfig, row_format: RowFormat) -> tuple[list[str], RecordSource]:
    """The files of the training data, and their documents in order."""
    if row_format.has_masks:
        raise ConfigError(
            "data prepare writes token ids without masks, and fine-tuning reads the rows "
            "themselves: leave out the key of its method, or do not prepare the data"
        )
    kind = config.dataset_type.value
    if kind == "grain":
        entries = parse_mixture(config, Split.TRAIN)
        if len(entries) > 1:
            raise ConfigError(
                "a mixture is shuffled in each training run: prepare each of its parts with an "
                "--out of its own, then give the results their weights in grain_train_files"
            )
        key, value, _ = entries[0]
        files, columns = find_files(key, value), data_columns(config, Split.TRAIN)
        return files, open_files(
            files, file_type(config, files), columns, config.grain_data_source_max_workers
        )
    if kind == "hf":
        from maxtext.input_pipeline import hf_source  # here, since importing Grain takes seconds

        value = hf_source.named_files(config, Split.TRAIN)
        if hf_source.is_local(config, Split.TRAIN, value):
            return find_files("hf_train_files", value), hf_source.local_component(
                config, Split.TRAIN, row_format, value
            ).documents
        raise ConfigError(
            f"hf_path={config.hf_path} is a stream: name local files in hf_train_files to prepare "
            "them"
        )
    raise ConfigError(
        f"dataset_type={kind} cannot be prepared: name files of documents, with dataset_type=grain "
        "and grain_train_files, or dataset_type=hf and hf_train_files"
    )


def identity(tokenizer: Tokenizer) -> Json:
    """Values that identify a tokenizer, independent of the path of its file."""
    path = getattr(tokenizer, "path", None)
    content = (
        hashlib.sha256(path.read_bytes()).hexdigest() if isinstance(path, Path) else tokenizer.name
    )
    return {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "content": content}


def inputs_of(files: list[str]) -> dict[str, list[int]]:
    try:
        stats = {os.path.abspath(file): os.stat(file) for file in files}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read any more ({error.strerror})") from error
    return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def check_output(out: Path) -> None:
    wrong = [character for character in SPECIAL_CHARACTERS if character in str(out)]
    if wrong:
        raise ConfigError(
            f"--out {out}: {wrong[0]!r} has a meaning in grain_train_files, choose a name without "
            "it"
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: name a folder")
    if visible(out) and not (out / MANIFEST).is_file():
        raise ConfigError(
            f"--out {out} holds other files, such as {visible(out)[0]}: name an empty or a new "
            "folder"
        )


def visible(out: Path) -> list[str]:
    return sorted(
        name for name in (os.listdir(out) if out.is_dir() else []) if not name.startswith(".")
    )


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Create the folder if needed and lock it for this run. Yields the descriptor for the workers:
    the lock lasts as long as one of them lives.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be created or opened ({error.strerror})") from error
    try:
        wait_for_lock(handle, out)
        yield handle
    finally:
        os.close(handle)


def wait_for_lock(handle: int, out: Path) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ConfigError(
                    f"--out {out}: another run writes there, wait until it ends"
                ) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return
        else:
            return


def resume_manifest(out: Path, work: PreparePlan) -> Manifest:
    """The manifest of an interrupted run with the same plan, or a new one. Raises ConfigError if
    the plan is another.
    """
    path = out / MANIFEST
    manifest = Manifest(path, work.settings, work.inputs)
    check_output(out)  # again, now that the folder is locked
    names = {shard.name for shard in work.shards}
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            is_current_format = content["format"] == FORMAT
            settings, inputs = content["settings"], content["inputs"]
            finished = {name: Counts(**counts) for name, counts in content["shards"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not a manifest of prepared data: choose another --out"
            ) from error
        if not is_current_format:
            raise ConfigError(f"{path} was written by another version: choose another --out")
        for name in {**settings, **work.settings}:
            if settings.get(name) != work.settings.get(name):
                raise ConfigError(
                    f"--out {out} was begun with {name} {settings.get(name)}, but now it is "
                    f"{work.settings.get(name)}: continue with the old settings, or choose another "
                    "--out"
                )
        if inputs != work.inputs:
            raise ConfigError(
                f"{changed(inputs, work.inputs)} since --out {out} was begun: choose another --out"
            )
        manifest.finished = {
            name: counts for name, counts in finished.items() if is_complete(out / name, counts)
        }
    strange = [name for name in visible(out) if name != MANIFEST and name not in names]
    if strange:
        raise ConfigError(
            f"--out {out} holds other files, such as {strange[0]}: remove them, or choose another "
            "folder"
        )
    return manifest


def is_complete(shard: Path, counts: Counts) -> bool:
    return shard.is_file() and shard.stat().st_size == counts.bytes


def changed(before: dict[str, list[int]], after: dict[str, list[int]]) -> str:
    file = next(name for name in sorted({**before, **after}) if before.get(name) != after.get(name))
    how = (
        "has been added"
        if file not in before
        else "is gone"
        if file not in after
        else "has changed"
    )
    return f"{file} {how}"


def clean(out: Path, work: PreparePlan, manifest: Manifest) -> None:
    """Remove the incomplete files of an interrupted run."""
    begun = [out / shard.name for shard in work.shards if shard.name not in manifest.finished]
    leftovers = [*begun, *map(temporary, begun)]
    leftovers += [Path(name) for name in glob.glob(f"{glob.escape(str(out))}/.{MANIFEST}.*.tmp")]
    for path in leftovers:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
