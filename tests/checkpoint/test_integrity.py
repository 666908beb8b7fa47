"""Digests detect every change of a step's files."""

import json

import pytest

from maxtext.checkpoint.steps import (
    digest_file,
    files_without_digest,
    read_digests,
    verify,
    write_digest,
)

FILES = (
    "state/ocdbt.process_0/d/one",
    "state/ocdbt.process_1/d/two",
    "state/manifest",
    "run/run.json",
    "mark",
)


@pytest.fixture
def step(tmp_path):
    for number, name in enumerate(FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(range(number, number + 100)))
    return tmp_path


def test_unchanged_files_verify(step):
    write_digest(step)
    assert verify(step) == []
    assert files_without_digest(step) == []


def test_detects_every_flipped_bit(step):
    write_digest(step)
    for name in FILES:
        path = step / name
        good = path.read_bytes()
        path.write_bytes(good[:50] + bytes([good[50] ^ 4]) + good[51:])
        assert verify(step) == [f"{name} has changed since it was written"]
        assert verify(step, thorough=False) == []
        path.write_bytes(good)
    assert verify(step) == []


def test_reports_truncated_and_missing_files(step):
    write_digest(step)
    (step / FILES[0]).write_bytes(b"short")
    (step / FILES[2]).unlink()
    problems = verify(step, thorough=False)
    assert problems == ["state/manifest is missing", f"{FILES[0]} has 5 bytes instead of 100"]


def test_step_without_digest_verifies(step):
    assert verify(step) == []
    assert set(files_without_digest(step)) == set(FILES)


def test_damaged_digest_is_a_problem(step):
    write_digest(step)
    (step / digest_file(0)).write_text('{"files": ')
    assert len(verify(step)) == 1


def test_processes_digest_disjoint_files(step):
    write_digest(step, 0, 2)
    first = set(read_digests(step))
    assert FILES[0] in first
    assert FILES[1] not in first, "each process reads back what it wrote itself"
    write_digest(step, 1, 2)
    assert set(read_digests(step)) == set(FILES)
    parts = [json.loads((step / digest_file(process)).read_text())["files"] for process in (0, 1)]
    assert not set(parts[0]) & set(parts[1])
    (step / FILES[1]).write_bytes(b"")
    assert sum(len(verify(step, process, 3)) for process in range(3)) == 1, (
        "any number of processes finds it once"
    )
