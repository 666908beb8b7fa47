import logging
import os
import resource

import pytest

from maxtext.common import errors, extras, files, log
from maxtext.common.errors import MissingExtra
from maxtext.common.hardware import (
    TABLE,
    available_host_bytes,
    lookup,
    peak_flops,
    process_bytes,
)


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    files.write_text(path, "old")

    def fail():
        with files.atomic_writer(path) as file:
            file.write("half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.txt"]


def test_write_is_atomic_and_keeps_the_mode(tmp_path):
    path = tmp_path / "file.bin"
    with files.atomic_writer(path, "wb") as file:
        file.write(b"one")
    assert path.stat().st_mode & 0o777 == 0o666 & ~files.current_umask()
    path.chmod(0o640)
    with files.atomic_writer(path, "wb") as file:
        file.write(b"two")
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ValueError, match="replaces files"), files.atomic_writer(path, "a"):
        pass


def test_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setitem(extras.EXTRA_OF, "no_such_package", "hf")
    with pytest.raises(MissingExtra, match=r'pip install -e .*\[hf\]"'):
        extras.require("no_such_package.module", "reading the hub")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_looks_up_listed_devices(kind, name):
    assert lookup(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H300", "TPU v9", "NVIDIA L400", "", "NVIDIA H100"])
def test_unlisted_devices_have_no_peak(kind):
    assert lookup(kind) is None
    assert peak_flops(kind, "bfloat16") is None


def test_peaks_are_dense_and_in_flops():
    assert peak_flops("NVIDIA H200", "bfloat16") == pytest.approx(989.4e12)
    assert peak_flops("TPU v5p", "bfloat16") == pytest.approx(459e12)
    assert peak_flops("NVIDIA V100", "bfloat16") is None
    for _, hardware in TABLE:  # a peak below 1 FLOP per byte of bandwidth would be a wrong unit
        assert all(peak > hardware.bandwidth for peak in hardware.peak.values())
        assert 10e9 < hardware.memory_bytes < 400e9


def test_log_lines(capsys):
    try:
        log.configure(process_index=2, process_count=4)
        log.LOGGER.info("first\nsecond")
        line = capsys.readouterr().err
        assert line.endswith("INFO [2/4] first | second\n")
        assert line.count("\n") == 1
        log.configure()
        log.LOGGER.info("alone")
        assert "[" not in capsys.readouterr().err
        log.LOGGER.debug("quiet")
        assert capsys.readouterr().err == ""
    finally:
        log.LOGGER.handlers.clear()
        log.LOGGER.propagate = True
        log.LOGGER.setLevel(logging.NOTSET)


def test_lost_peer_becomes_a_user_error():
    class JaxRuntimeError(Exception):
        pass

    gloo = JaxRuntimeError(
        "INTERNAL: Gloo all-reduce failed: [external/gloo/tcp/pair.cc:547] Connection closed by "
        "peer"
    )
    assert "connection to another process of this run was lost" in str(errors.lost_peer(gloo))
    assert errors.lost_peer(JaxRuntimeError("INVALID_ARGUMENT: shapes differ")) is None
    assert errors.lost_peer(ValueError("gloo")) is None


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "sys/fs/cgroup/a", ("memory.max", "memory.current", "inactive_file")),
        (
            "8:cpu,memory:/a/b",
            "sys/fs/cgroup/memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_available_host_memory_is_bounded_by_every_cgroup(tmp_path, line, folder, names):
    """File caches of a cgroup count as free; a limit of a parent counts, "max" is none."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/\n{line}\n")
    parent = tmp_path / folder
    (parent / "b").mkdir(parents=True)
    assert available_host_bytes(tmp_path) == 4000 * 1024
    limit, used, cache = names
    (parent / "b" / limit).write_text("max\n")
    (parent / "b" / used).write_text("500\n")
    (parent / limit).write_text("3000\n")
    (parent / used).write_text("1200\n")
    (parent / "memory.stat").write_text(f"anon 900\n{cache} 200\n")
    assert available_host_bytes(tmp_path) == 3000 - 1200 + 200


def test_available_host_memory_is_bounded_by_the_address_space(tmp_path, monkeypatch):
    """`ulimit -v` limits the address space, of which a process has used some already."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/statm").write_text("100 40 9 1 0 60 0\n")
    page = resource.getpagesize()
    for limit, expected in ((300 * page, 200 * page), (50 * page, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert available_host_bytes(tmp_path) == expected
    assert process_bytes(tmp_path) == (100 * page, 40 * page)
