"""Documents written as every kind of source, with the libraries that people write them with, and
the keys to read them.

A initializer gets a folder and the documents and returns settings of the configuration. Files of
several documents are written in more than one file, tables in more than one block.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from array_record.python import array_record_module

from maxtext.configs.types import DatasetType

FILES = 3


def parts(documents):
    return [list(part) for part in np.array_split(np.array(documents, object), FILES)]


def text(folder, documents):
    for number, document in enumerate(documents):
        (folder / f"{number:04}.txt").write_text(document)
    return {"grain_train_files": str(folder), "grain_file_type": "text"}


def jsonl(folder, documents):
    for number, part in enumerate(parts(documents)):
        lines = [json.dumps({"text": document, "id": index}) for index, document in enumerate(part)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return {"grain_train_files": f"{folder}/*.jsonl", "grain_file_type": "jsonl"}


def parquet(folder, documents):
    for number, part in enumerate(parts(documents)):
        table = pyarrow.table({"id": range(len(part)), "text": part})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=4)
    return {"grain_train_files": f"{folder}/*.parquet", "grain_file_type": "parquet"}


def example(document):
    """tf.train.Example of one bytes feature, written from the definition of its messages."""

    def message(field, data):
        return bytes([field << 3 | 2]) + varint(len(data)) + data

    def varint(number):
        return (
            bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)
        )

    feature = message(1, message(1, document.encode()))
    return message(1, message(1, message(1, b"text") + message(2, feature)))


def write_array_records(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def arrayrecord(folder, documents):
    for number, part in enumerate(parts(documents)):
        write_array_records(folder / f"{number}.array_record", map(example, part))
    return {"grain_train_files": f"{folder}/*.array_record", "grain_file_type": "arrayrecord"}


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack(
        "<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    )  # masked, as TFRecord wants it


def write_tfrecords(path, records):
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + crc32c(length) + record + crc32c(record))


def tfrecord(folder, documents):
    for number, part in enumerate(parts(documents)):
        write_tfrecords(folder / f"{number}.tfrecord", map(example, part))
    return {"grain_train_files": f"{folder}/*.tfrecord", "grain_file_type": "tfrecord"}


def mixture(folder, documents):
    """Two halves with equal weights: every document once."""
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half : 2 * half])):
        (folder / name).mkdir()
        jsonl(folder / name, part)
    return {"grain_train_files": f"{folder}/a,0.5;{folder}/b,0.5", "grain_file_type": "jsonl"}


def hf_of(loader, suffix):
    def make(folder, documents):
        for number, part in enumerate(parts(documents)):
            path = folder / f"{number}.{suffix}"
            if loader == "text":
                path.write_text("\n".join(part) + "\n")
            elif loader == "arrow":
                table = pyarrow.table({"text": part})
                with (
                    pyarrow.OSFile(str(path), "wb") as file,
                    pyarrow.ipc.new_stream(file, table.schema) as writer,
                ):
                    writer.write_table(table, max_chunksize=4)
        if loader in ("json", "parquet"):
            {"json": jsonl, "parquet": parquet}[loader](folder, documents)
        return {
            "dataset_type": DatasetType.HF,
            "hf_path": loader,
            "hf_train_files": f"{folder}/*.{suffix}",
        }

    return make


def hf_stream(folder, documents):
    """A folder as the hub has it: without hf_train_files it is `datasets` that reads it."""
    (folder / "data").mkdir()
    parquet(folder / "data", documents)
    return {"dataset_type": DatasetType.HF, "hf_path": str(folder)}


def tfds_of(file_format):
    def make(folder, documents):
        """The files and descriptions that TensorFlow Datasets leaves behind."""
        home = folder / "tiny" / "1.0.0"
        home.mkdir(parents=True)
        for number, part in enumerate(parts(documents)):
            path = home / f"tiny-train.{file_format}-{number:05}-of-{FILES:05}"
            write = write_tfrecords if file_format == "tfrecord" else write_array_records
            write(path, map(example, part))
        lengths = [str(len(part)) for part in parts(documents)]
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        split = {
            "name": "train",
            "shardLengths": lengths,
            "numBytes": "100",
            "filepathTemplate": template,
        }
        info = {"name": "tiny", "version": "1.0.0", "fileFormat": file_format, "splits": [split]}
        (home / "dataset_info.json").write_text(json.dumps(info))
        feature = {
            "pythonClassName": "tensorflow_datasets.core.features.text_feature.Text",
            "text": {},
        }
        features = {
            "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
            "featuresDict": {"features": {"text": feature}},
        }
        (home / "features.json").write_text(json.dumps(features))
        return {
            "dataset_type": DatasetType.TFDS,
            "dataset_name": "tiny:1.0.0",
            "dataset_path": str(folder),
        }

    return make


def c4_mlperf(folder, documents):
    return tfds_of("array_record")(folder, documents) | {"dataset_type": DatasetType.C4MLPERF}


def own_documents(config, split):
    """A source of the user's own: dataset_type=tests.input_pipeline.corpora:own_documents."""
    if split == "eval":
        return None
    return [{"text": line} for line in Path(config.hf_data_dir).read_text().splitlines()]


def custom(folder, documents):
    (folder / "lines").write_text("\n".join(documents))
    # Any key that the function reads would do.
    return {
        "dataset_type": DatasetType(f"{__name__}:own_documents"),
        "hf_data_dir": str(folder / "lines"),
    }


SOURCES = {
    "text": text,
    "jsonl": jsonl,
    "parquet": parquet,
    "arrayrecord": arrayrecord,
    "tfrecord": tfrecord,
    "mixture": mixture,
    "hf-parquet": hf_of("parquet", "parquet"),
    "hf-json": hf_of("json", "jsonl"),
    "hf-arrow": hf_of("arrow", "arrow"),
    "hf-text": hf_of("text", "txt"),
    "hf-stream": hf_stream,
    "tfds": tfds_of("array_record"),
    "tfds-tfrecord": tfds_of("tfrecord"),
    "c4_mlperf": c4_mlperf,
    "custom": custom,
}
