"""Records reach every writer that the configuration asks for, and a failing writer harms neither
the run nor others.
"""

import io
import json
import socket
import sys
import types
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maxtext.common.errors import ConfigError, MissingExtra
from maxtext.diagnostics.jsonl import JsonLines, read_metrics, write_summary
from maxtext.diagnostics.metrics import Recorder, make_writers, to_record
from maxtext.diagnostics.tensorboard import EventFile, Prometheus

NAN, INFINITY = float("nan"), float("inf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def names(writers) -> list[str]:
    return [type(writer).__name__ for writer in writers]


class Memory:
    def __init__(self, fails_at: int | None = None):
        self.records, self.closed, self.fails_at = [], 0, fails_at

    def write(self, record):
        if record["step"] == self.fails_at:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def close(self):
        self.closed += 1


# The recorder.


def test_to_record_converts_scalars_of_all_libraries():
    given = {
        "step": np.int32(3),
        "loss": jnp.float32(1.5),
        "norm": jnp.bfloat16(2.5),
        "skipped": np.bool_(True),
        "mfu": None,
    }
    got = to_record(given)
    assert got == {"step": 3, "loss": 1.5, "norm": 2.5, "skipped": 1, "mfu": None}
    assert [type(value) for value in got.values()] == [int, float, float, int, type(None)]
    with pytest.raises(TypeError, match=r"shape \(2,\)"):
        to_record({"loss": np.zeros(2)})


def test_drops_a_writer_that_raises(log):
    good, bad = Memory(), Memory(fails_at=1)
    with Recorder([bad, good]) as recorder:
        for step in range(4):
            recorder.write({"step": step})
    assert [record["step"] for record in good.records] == [0, 1, 2, 3]
    assert [record["step"] for record in bad.records] == [0]
    assert (good.closed, bad.closed) == (1, 1)
    assert len(log) == 1
    assert "No space left" in log[0]


def test_closes_all_writers_even_if_one_raises(log):
    class Broken(Memory):
        def close(self):
            raise OSError("gone")

    first, last = Memory(), Memory()
    Recorder([first, Broken(), last]).close()
    assert (first.closed, last.closed) == (1, 1)
    assert len(log) == 1


# Which writers.


def test_writers_of_a_configuration(make_config, tmp_path):
    everything = make_config(metrics_file=str(tmp_path / "m.jsonl"), prometheus_port=free_port())
    for config, expected in (
        (make_config(enable_tensorboard=False), ["JsonLines", "Console"]),
        (make_config(), ["EventFile", "JsonLines", "Console"]),
        (everything, ["Prometheus", "EventFile", "JsonLines", "Console"]),
    ):
        writers = make_writers(config, stream=io.StringIO(), environ={})
        assert names(writers) == expected
        Recorder(writers).close()


def test_other_processes_have_no_writers(make_config, tmp_path):
    config = make_config(metrics_file=str(tmp_path / "m.jsonl"), prometheus_port=free_port())
    assert make_writers(config, is_writer=False, environ={"WANDB_PROJECT": "p"}) == []
    assert list(tmp_path.iterdir()) == []


def test_port_in_use_is_an_error_before_files_change(make_config, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 9}\n')
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"prometheus_port={port} cannot be opened.*choose another"
        ):
            make_writers(make_config(prometheus_port=port, metrics_file=str(path)), environ={})
    assert path.read_text() == '{"step": 9}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_error_at_construction_closes_earlier_writers(make_config, tmp_path):
    port = free_port()
    with pytest.raises(ConfigError, match="metrics_file=.* cannot be written"):
        make_writers(make_config(prometheus_port=port, metrics_file=str(tmp_path)), environ={})
    Prometheus(port).close()  # the port is free again


# metrics_file.


def test_metrics_are_written_to_the_folder_of_the_run_by_default(make_config, tmp_path):
    config = make_config()
    for writer in make_writers(config, environ={}):
        writer.write({"step": 0, "loss": 1.0})
        writer.close()
    lines = (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0, "loss": 1.0}']


def test_lines_are_flushed_valid_json_and_round_trip(tmp_path):
    path = tmp_path / "folder" / "m.jsonl"
    writer = JsonLines(path)
    records = [
        {"step": 0, "loss": 2.5, "mfu": None},
        {"step": 1, "loss": NAN, "grad_norm": INFINITY, "z": -INFINITY},
    ]

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for count, record in enumerate(records, 1):
        writer.write(record)
        lines = (
            path.read_text().splitlines()
        )  # before close: a reader sees each record as soon as it is written
        assert len(lines) == count
        raw = json.loads(lines[-1], parse_constant=refuse)
    assert raw == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "z": None,
        "not_finite": {"loss": "NaN", "grad_norm": "Infinity", "z": "-Infinity"},
    }
    writer.close()
    back = read_metrics(path)
    assert back[0] == records[0]
    assert np.isnan(back[1].pop("loss"))
    assert back[1] == {"step": 1, "grad_norm": INFINITY, "z": -INFINITY}


def test_resumed_run_drops_repeated_steps_and_incomplete_lines(tmp_path, log):
    path = tmp_path / "m.jsonl"
    path.write_text(
        "".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(6)) + '{"step": 6, "lo'
    )
    writer = JsonLines(path, first_step=4)
    writer.write({"step": 4, "loss": 40.0})
    writer.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [
        (0, 0.5),
        (1, 1.5),
        (2, 2.5),
        (3, 3.5),
        (4, 40.0),
    ]
    assert len([line for line in log if "dropped 3 line(s)" in line]) == 1


def test_keeps_a_complete_last_line_without_newline(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    writer = JsonLines(path, first_step=2)
    writer.write({"step": 2})
    writer.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_new_run_renames_the_file_of_an_earlier_run(tmp_path, log):
    path = tmp_path / "m.jsonl"
    for run in range(3):
        writer = JsonLines(path)
        writer.write({"step": 0, "loss": float(run)})
        writer.close()
    assert read_metrics(path) == [{"step": 0, "loss": 2.0}]
    assert read_metrics(tmp_path / "m.jsonl.1") == [{"step": 0, "loss": 0.0}]
    assert read_metrics(tmp_path / "m.jsonl.2") == [{"step": 0, "loss": 1.0}]


def test_full_disk_drops_the_writer_only(log):
    recorder = Recorder([JsonLines("/dev/full"), Memory()])
    recorder.write({"step": 0})
    recorder.write({"step": 1})
    assert names(recorder.writers) == ["Memory"]
    assert len(log) == 1
    recorder.close()


def test_summary_is_valid_json(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(
        path,
        {
            "loss": NAN,
            "final": {"step": np.int64(9), "loss": np.float32(0.5)},
            "list": [1, INFINITY],
        },
    )
    write_summary(path, json.loads(path.read_text()) | {"path": tmp_path})
    assert json.loads(path.read_text()) == {
        "loss": None,
        "final": {"step": 9, "loss": 0.5},
        "list": [1, None],
        "not_finite": {"loss": "NaN"},
        "path": str(tmp_path),
    }
    assert list(tmp_path.iterdir()) == [path]


# TensorBoard.


def scalars(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_events(make_config):
    config = make_config()
    recorder = Recorder(make_writers(config, stream=io.StringIO(), environ={}))
    for step in (0, 1, 300):
        recorder.write(
            {"step": step, "loss": step + 0.5, "mfu": None if step == 1 else 0.25, "moe/lb": 1e300}
        )
    recorder.write({"step": 300, "eval_loss": NAN})
    recorder.close()
    assert scalars(config.tensorboard_dir, "learning/loss") == [(0, 0.5), (1, 1.5), (300, 300.5)]
    assert scalars(config.tensorboard_dir, "performance/mfu") == [(0, 0.25), (300, 0.25)]
    assert scalars(config.tensorboard_dir, "moe/lb")[0][1] == pytest.approx(3.4e38)
    ((step, value),) = scalars(config.tensorboard_dir, "eval/loss")
    assert step == 300
    assert np.isnan(value)


def test_tensorboard_discards_steps_that_a_resumed_run_repeats(tmp_path):
    for first, last, loss in ((0, 5, 1.0), (3, 6, 2.0)):
        writer = EventFile(tmp_path, first_step=first)
        for step in range(first, last):
            writer.write({"step": step, "loss": loss})
        writer.close()
    assert scalars(tmp_path, "learning/loss") == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
    ]


def test_log_period_is_the_flush_interval(make_config):
    config = make_config(log_period=4)
    recorder = Recorder(make_writers(config, stream=io.StringIO(), environ={}))
    seen = []
    for step in range(1, 9):
        recorder.write({"step": step, "loss": 0.0})
        seen.append(len(scalars(config.tensorboard_dir, "learning/loss")) if step >= 4 else 0)
    recorder.close()
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8]


# Prometheus.


def scrape(port: int) -> dict[str, float]:
    """Gauges by name, read by prometheus_client's own parser."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(response.read().decode()))
    assert {family.type for family in families} <= {"gauge"}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_prometheus_serves_the_latest_value_of_each_gauge():
    port = free_port()
    writer = Prometheus(port)
    try:
        assert scrape(port) == {}
        writer.write({"step": 1, "loss": 2.5, "mfu": 0.4, "eval_loss": 3.0, "moe/lb-loss": 1e-7})
        writer.write({"step": 2, "loss": NAN, "mfu": None, "grad_norm": INFINITY})
        gauges = scrape(port)
        assert np.isnan(gauges.pop("maxtext_loss"))
        assert gauges == {
            "maxtext_step": 2.0,
            "maxtext_eval_loss": 3.0,
            "maxtext_moe_lb_loss": 1e-7,
            "maxtext_grad_norm": INFINITY,
        }
    finally:
        writer.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_prometheus_port_names_the_extra_if_the_client_is_missing(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r'prometheus_port=9 needs .*\[prometheus\]"'):
        make_writers(make_config(prometheus_port=9), environ={})


# Weights & Biases.


def test_weights_and_biases_is_enabled_by_its_environment(make_config, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(run_name="mine", enable_tensorboard=False)
    off = make_writers(config, environ={"WANDB_PROJECT": "p", "WANDB_MODE": "disabled"})
    assert names(off) == ["JsonLines", "Console"]
    recorder = Recorder(
        make_writers(config, environ={"WANDB_MODE": "offline"}, stream=io.StringIO())
    )
    recorder.write({"step": 7, "loss": 1.0, "mfu": None})
    recorder.close()
    assert (calls[0]["name"], calls[0]["dir"], calls[0]["config"]["steps"]) == (
        "mine",
        config.metrics_dir,
        100,
    )
    json.dumps(calls[0]["config"])
    assert calls[1:] == [(7, {"loss": 1.0}), "finish"]


@pytest.mark.parametrize(
    ("keys", "environ", "expected"),
    [
        ({}, {}, ("maxtext", "mine")),
        ({"wandb_project_name": "p", "wandb_run_name": "r"}, {}, ("p", "r")),
        ({}, {"WANDB_PROJECT": "theirs"}, (None, "mine")),  # the package reads it
        ({}, {"WANDB_MODE": "disabled"}, None),
    ],
)
def test_enable_wandb_enables_weights_and_biases(make_config, monkeypatch, keys, environ, expected):
    calls = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(run_name="mine", enable_tensorboard=False, enable_wandb=True, **keys)
    writers = names(make_writers(config, environ=environ))
    assert ("WeightsAndBiases" in writers) == (expected is not None)
    assert [(call["project"], call["name"]) for call in calls] == [expected] * len(calls)
    assert len(calls) == (expected is not None)


def test_weights_and_biases_names_its_extra(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import now fails
    with pytest.raises(MissingExtra, match=r"WANDB_PROJECT.*\[wandb\]"):
        make_writers(make_config(), environ={"WANDB_PROJECT": "p"})
    with pytest.raises(MissingExtra, match=r"enable_wandb=true.*\[wandb\]"):
        make_writers(make_config(enable_wandb=True), environ={})
