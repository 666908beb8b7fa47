"""The index of pre-tokenized shards: its published format, and errors for invalid indexes."""

import hashlib
import json

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from maxtext.input_pipeline.olmo_index import read_index, remap_paths, token_offsets, write_index


@pytest.fixture
def published(tmp_path):
    """An index as the format describes it, and the raw shards that it names: 10, 3 and 8 tokens in
    instances of 4.
    """
    files, offset = [], 0
    for name, tokens, instances in (("a", 10, 2), ("b", 3, 0), ("c", 8, 2)):
        path = tmp_path / f"{name}.npy"
        np.arange(tokens, dtype="<u4").tofile(path)
        files.append(
            {
                "path": str(path),
                "label": name * 2,
                "n_tokens": tokens,
                "n_instances": instances,
                "instance_offset": offset,
            }
        )
        offset += instances
    digest = hashlib.sha256(b"1\x004\x00uint32\x00some/tokenizer\x00")
    for file in files:
        digest.update(file["path"].encode() + b"\x00" + str(file["n_tokens"]).encode() + b"\x00")
    return {
        "format_version": "1",
        "sequence_length": 4,
        "dtype": "uint32",
        "tokenizer": "some/tokenizer",
        "total_instances": 4,
        "total_tokens": 21,
        "fingerprint": f"sha256:{digest.hexdigest()}",
        "files": files,
    }


@pytest.fixture
def save(tmp_path):
    def save_index(content) -> str:
        path = tmp_path / "index.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return save_index


def test_reads_and_writes_the_published_format(published, save, tmp_path):
    index = read_index(save(published))
    assert index.as_json() == published
    paths, labels = ([file[name] for file in published["files"]] for name in ("path", "label"))
    out = tmp_path / "made" / "index.json"
    written = write_index(out, paths, 4, tokenizer="some/tokenizer", labels=labels)
    assert json.loads(out.read_text()) == published
    assert written == index == read_index(str(out))


def test_counts_follow_from_lengths(published, save):
    needed = {key: published[key] for key in ("format_version", "sequence_length", "dtype")}
    needed["files"] = [
        {key: file[key] for key in ("path", "n_tokens")} for file in published["files"]
    ]
    index = read_index(save(needed))
    assert (index.instances, index.tokens) == (4, 21)
    assert [index.locate(number) for number in range(4)] == [(0, 0), (0, 4), (2, 0), (2, 4)]


def test_fingerprint_differs_for_each_index(published, save):
    seen = {read_index(save(published)).fingerprint}
    for key, value in (
        ("sequence_length", 5),
        ("dtype", "uint16"),
        ("files", published["files"][:2]),
    ):
        other = {
            name: published[name] for name in ("format_version", "dtype", "sequence_length")
        } | {key: value}
        other["files"] = [
            {name: file[name] for name in ("path", "n_tokens")} for file in other.get("files", [])
        ]
        other["files"] = other["files"] or [{"path": "a", "n_tokens": 10}]
        seen.add(read_index(save(other)).fingerprint)
    assert len(seen) == 4


def test_npy_header_gives_dtype_and_offset(tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "raw.npy")
    np.save(tmp_path / "real.npy", np.arange(12, dtype=np.uint16))
    paths = [str(tmp_path / "raw.npy"), str(tmp_path / "real.npy")]
    index = write_index(tmp_path / "index.json", paths, 4, dtype="uint16")
    assert index.dtype == "uint16"
    assert [shard.tokens for shard in index.shards] == [9, 12]
    raw, real = token_offsets(index)
    assert raw == 0
    assert (tmp_path / "real.npy").read_bytes()[real:] == np.arange(12, dtype=np.uint16).tobytes()
    # The raw one is taken for uint32 here, and the header of the other contradicts.
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "raw.npy")
    with pytest.raises(UserError, match="different types, uint16 and uint32"):
        write_index(tmp_path / "index.json", paths, 4)


def test_remap_replaces_path_prefixes_only(published, save):
    published["files"][0]["path"] = "gs://bucket/x/gs://bucket/a.npy"
    index = remap_paths(read_index(save(published)), "gs://bucket/", "/mnt/")
    assert [shard.path for shard in index.shards] == [
        "/mnt/x/gs://bucket/a.npy",
        *(file["path"] for file in published["files"][1:]),
    ]
    with pytest.raises(
        ConfigError, match="olmo_path_remap_from=s3://: no path .* starts so, the first is gs:"
    ):
        remap_paths(read_index(save(published)), "s3://", "/mnt/")


def without(key):
    return lambda index: index.pop(key)


def without_in_a_file(key):
    return lambda index: index["files"][1].pop(key)


def setting(**values):
    return lambda index: index.update(values)


def setting_in_a_file(**values):
    return lambda index: index["files"][2].update(values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("sequence_length"), "has no sequence_length, and needs one of type int"),
        (without("files"), "has no files"),
        (without("format_version"), "has no format_version"),
        (without_in_a_file("path"), r"files\[1\] has no path"),
        (without_in_a_file("n_tokens"), r"files\[1\] has no n_tokens"),
        (setting(format_version="2"), "format_version '2', and this version reads '1'"),
        (setting(sequence_length="4"), "has sequence_length='4', and needs one of type int"),
        (setting(sequence_length=True), "has sequence_length=True"),
        (setting(sequence_length=1), "a target needs two tokens"),
        (setting(dtype="float32"), "dtype='float32' is not an integer type"),
        (setting(dtype="words"), "dtype='words' is not an integer type"),
        (setting(files=[]), "names no files"),
        (setting(files=["a.npy"]), r"files\[0\] is not a JSON object"),
        (setting(total_tokens=22), "total_tokens do not follow"),
        (setting_in_a_file(instance_offset=3), r"files\[2\].instance_offset do not follow"),
        (setting_in_a_file(n_tokens=-1), "n_tokens is negative for .*c.npy"),
    ],
)
def test_invalid_index_raises(published, save, change, said):
    change(published)
    with pytest.raises(ConfigError, match=said) as caught:
        read_index(save(published))
    assert "olmo_index_path=" in str(caught.value)


def test_missing_index_raises(save, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_index(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_index(str(tmp_path))
    with pytest.raises(ConfigError, match="is not a JSON file"):
        read_index(save("a,b\n"))
    (tmp_path / "index.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a JSON file"):
        read_index(str(tmp_path / "index.json"))
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_index(save([1]))


def spoil(path, how):
    if how == "missing":
        path.unlink()
    elif how == "short":
        np.arange(7, dtype="<u4").tofile(path)
    elif how == "long":
        np.arange(9, dtype="<u4").tofile(path)
    elif how == "other type":
        np.save(path, np.arange(8, dtype=np.uint16))
    elif how == "matrix":
        np.save(path, np.zeros((2, 4), np.uint32))
    elif how == "odd bytes":
        path.write_bytes(b"\0" * 33)
    elif how == "cut":
        np.save(path, np.arange(8, dtype=np.uint32))
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "directory":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "c.npy does not exist"),
        ("short", "c.npy holds 7 tokens, but the index says 8"),
        ("long", "c.npy holds 9 tokens, but the index says 8"),
        ("other type", "c.npy holds uint16, but the index says uint32"),
        ("matrix", r"c.npy has the shape \(2, 4\)"),
        ("odd bytes", "c.npy has 33 bytes, which is not a multiple of the size of uint32"),
        ("cut", "c.npy is a broken .npy file"),
        ("directory", "c.npy cannot be read: Is a directory"),
    ],
)
def test_shard_that_contradicts_the_index_raises(published, save, tmp_path, how, said):
    index = read_index(save(published))
    spoil(tmp_path / "c.npy", how)
    with pytest.raises(ConfigError, match=said) as caught:
        token_offsets(index)
    assert "1 of 3 shards" in str(caught.value)


def test_error_lists_five_bad_shards(tmp_path):
    paths = [str(tmp_path / f"{number}.npy") for number in range(8)]
    for path in paths:
        np.arange(4, dtype="<u4").tofile(path)
    index = write_index(tmp_path / "index.json", paths, 4)
    for path in paths[:7]:
        (tmp_path / path).unlink()
    with pytest.raises(ConfigError, match="7 of 8 shards") as caught:
        token_offsets(index)
    assert len(caught.value.problems) == 7
    assert caught.value.problems[4:6] == (f"{paths[4]} does not exist", "and 2 more")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"paths": ["none.npy"]}, "none.npy does not exist"),
        ({"paths": []}, "names no files"),
        ({"dtype": "float32"}, "not an integer type"),
        ({"sequence_length": 0}, "sequence_length=0"),
    ],
)
def test_write_index_rejects_bad_shards(published, tmp_path, arguments, said):
    paths = [file["path"] for file in published["files"]]
    out = tmp_path / "new.json"
    with pytest.raises(UserError, match=said):
        write_index(out, **({"paths": paths, "sequence_length": 4} | arguments))
    assert not out.exists()
