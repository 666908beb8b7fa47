"""`maxtext batch`: every line gets one result, whenever and however the job was stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from maxtext.cli.batch_files import ResultFile, read_lines
from maxtext.cli.main import main
from maxtext.common.errors import ConfigError, UserError
from tests.cli.fake_llm import FakeLLM

PROMPTS = ["one", "two", "three", "four", "five", "six", "seven"]


def write_requests(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def batch(tmp_path, *args):
    names = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    return main(["batch", *names, "--model", str(tmp_path / "model"), "jax_cache_dir=none", *args])


def read_results(tmp_path):
    """By the index of the line; fails if a line has two results."""
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    results = {
        record.pop("index"): {key: value for key, value in record.items() if key != "check"}
        for record in records
    }
    assert len(results) == len(records)
    return results


def test_one_result_a_line(tmp_path, folder, loaded, capsys):
    write_requests(
        tmp_path / "in.jsonl",
        *({"prompt": text, "id": [number]} for number, text in enumerate(PROMPTS)),
    )
    assert batch(tmp_path) == 0
    assert read_results(tmp_path) == {
        number: {"id": [number], "text": text[::-1], "finished": "length"}
        for number, text in enumerate(PROMPTS)
    }
    out = capsys.readouterr().out
    tokens = sum(map(len, PROMPTS))
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["7", "0", str(tokens)]


def test_fields_of_a_line(tmp_path, folder, loaded):
    messages = [{"role": "user", "content": "hi"}]
    write_requests(
        tmp_path / "in.jsonl",
        {"prompt": [1, 100, 101]},
        "",
        {"messages": messages},
        {"prompt": "ab", "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 11, "stop": "x"},
        {"prompt": "ab", "temperature": 1},
        {"prompt": "abcdef", "max_new_tokens": 2, "stop": ["x", "y"]},
    )
    assert batch(tmp_path, "init_weights_seed=100") == 0
    results = read_results(tmp_path)
    assert sorted(results) == [0, 2, 3, 4, 5]  # blank lines count, and have no result
    assert results[0] == {"ids": [101, 100], "finished": "length"}
    assert results[2]["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"[::-1]
    assert results[3]["text"] == "ba t=0.5 k=3 p=0.9 seed=11"
    assert results[4]["text"] == "ba t=1 k=0 p=1.0 seed=104"  # the key, and the number of the line
    assert results[5]["text"] == "fe"
    assert {request.params.stop for request in loaded[-1].requests} == {(), ("x",), ("x", "y")}


def test_line_overrides_the_keys_of_the_command(tmp_path, folder, loaded):
    write_requests(
        tmp_path / "in.jsonl",
        {"prompt": "a"},
        {"prompt": "a", "temperature": 0},
        {"prompt": "a", "top_p": 0.3},
    )
    args = [
        "decode_sampling_strategy=topk",
        "decode_sampling_top_k=5",
        "decode_sampling_temperature=2",
    ]
    assert batch(tmp_path, *args) == 0
    texts = [result["text"] for _, result in sorted(read_results(tmp_path).items())]
    assert texts == ["a t=2.0 k=5 p=1.0 seed=0", "a", "a t=2.0 k=5 p=0.3 seed=2"]


BAD = {
    "{": "not JSON",
    '"text"': "not a JSON object",
    "{}": "either a prompt or messages",
    '{"prompt": "a", "messages": []}': "either a prompt or messages",
    '{"prompt": "a", "temprature": 1}': "unknown field 'temprature'; did you mean temperature",
    '{"prompt": "a", "topic": 1}': "unknown field 'topic'",
    '{"prompt": 3}': "prompt must be text or a list of token ids",
    '{"prompt": [1, true]}': "prompt must be text or a list of token ids",
    '{"prompt": []}': "the prompt is empty",
    '{"prompt": [1, 9999]}': "outside the vocabulary",
    '{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens=0 must be between 1 and 62",
    '{"prompt": "a", "max_new_tokens": 63}': "max_new_tokens=63 must be between 1 and 62",
    '{"prompt": "a", "max_new_tokens": "many"}': "max_new_tokens must be a whole number",
    '{"prompt": "a", "temperature": true}': "temperature must be a number",
    '{"prompt": "a", "temperature": NaN}': "NaN is no number",
    '{"prompt": "a", "temperature": -Infinity}': "-Infinity is no number",
    '{"prompt": "a", "temperature": 1e999}': 'the number "1e999", which is too large',
    '{"prompt": "a", "temperature": 1e300}': "temperature=1e+300 must be a number from 0 to 1e+30",
    json.dumps({"prompt": "a", "temperature": 10**400}): "must be a number from 0 to 1e+30",
    '{"prompt": "a", "temperature": null}': "temperature must be a number, not null",
    '{"prompt": "a", "temperature": [1]}': "temperature must be a number, not [1]",
    '{"prompt": "a", "temperature": 1, "top_p": 0}': "top_p=0 must be above 0",
    '{"prompt": "a", "temperature": 1, "top_p": 1.5}': "top_p=1.5 must be above 0 and at most 1",
    '{"prompt": "a", "temperature": 1, "top_p": "0.5"}': "top_p must be a number",
    '{"prompt": "a", "temperature": 1, "top_k": -2}': "top_k=-2 must be at least 0",
    '{"prompt": "a", "temperature": 1, "top_k": 1.0}': "top_k must be a whole number, not 1.0",
    '{"prompt": "a", "max_new_tokens": -1}': "max_new_tokens=-1 must be between 1 and 62",
    '{"prompt": "a", "max_new_tokens": true}': "max_new_tokens must be a whole number, not true",
    '{"prompt": "a", "max_new_tokens": 1e30}': "max_new_tokens must be a whole number, not 1e+30",
    json.dumps({"prompt": "a", "max_new_tokens": 10**30}): "must be between 1 and 62",
    json.dumps({"prompt": "a", "seed": 10**30}): "has more than 64 bits",
    '{"prompt": "a", "seed": 1.5}': "seed must be a whole number",
    '{"prompt": "a", "stop": ["x", 5]}': "stop must be a text or a list of texts",
    '{"prompt": "a", "stop": 5}': "stop must be a text or a list of texts",
    '{"prompt": "a", "stop": null}': "stop must be a text or a list of texts",
    '{"prompt": null}': "prompt must be text or a list of token ids",
    '{"prompt": [1, 1.0]}': "prompt must be text or a list of token ids",
    '{"prompt": [1, -1]}': "outside the vocabulary",
    json.dumps({"prompt": [1, 10**30]}): "outside the vocabulary",
    '{"prompt": "a", "id": NaN}': "NaN is no number",
    '{"prompt": "a", "id": [1e999]}': 'the number "1e999", which is too large',
    '{"prompt": "a", "id": ' + "9" * 5000 + "}": "a number of 5000 digits: at most 1000",
    '{"prompt": "a", "id": ' + "[" * 150 + "]" * 150 + "}": "nested more than 100 levels deep",
    '{"prompt": "a", "prompt": "b"}': "'prompt' twice in one object",
    '{"prompt": "a", "id": {"x": 1, "x": 2}}': "'x' twice in one object",
    '{"messages": []}': "messages must be a list such as",
    '{"messages": null}': "messages must be a list",
    '{"messages": {"role": "user", "content": "a"}}': "messages must be a list",
    '{"messages": ["a"]}': "messages[0] must be an object with a role",
    '{"messages": [{"role": "user"}]}': "messages[0].content must be text or parts of text",
    '{"messages": [{"content": "a"}]}': "messages[0] must be an object with a role",
    json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": 5, "content": "a"}]}): (
        "messages[1] must be an object with a role"
    ),
    '{"messages": [{"role": "user", "content": 5}]}': "messages[0].content must be text",
    json.dumps({"messages": [{"role": "user", "content": None}]}): (
        "messages[0].content must be text"
    ),
    '{"messages": [{"role": "user", "content": ["a"]}]}': "messages[0] has a part that is not text",
    '{"prompt": "a", "temperature": -1}': "temperature=-1",
    '{"prompt": "a", "response_format": {"type": "yaml"}}': "response_format.type must be text",
    '{"prompt": "a", "structured_outputs": {"regex": 5}}': "structured_outputs.regex must be text",
    json.dumps({"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": 5}): (
        "either response_format or structured_outputs"
    ),
    '{"prompt": "a", "n": 129}': "n=129 must be a whole number from 1 to 128",
    '{"prompt": "a", "min_p": 1.5}': "min_p=1.5 must be a number from 0 to 1",
    '{"prompt": "a", "presence_penalty": 3}': "presence_penalty=3 must be a number from -2 to 2",
    '{"prompt": "a", "frequency_penalty": "1"}': "frequency_penalty must be a number",
    '{"prompt": "a", "repetition_penalty": 0}': "repetition_penalty=0 must be a number from",
    '{"prompt": "a", "logit_bias": {"x": 1}}': "no token id",
    '{"prompt": "a", "logit_bias": {"5": 101}}': "must be a number from -100 to 100, not 101",
    '{"prompt": "a", "logit_bias": [5]}': "logit_bias must be an object",
    '{"prompt": "a", "allowed_token_ids": []}': "allowed_token_ids is empty",
    '{"prompt": "a", "bad_words": [5]}': "bad_words must be a text or a list of texts",
    '{"prompt": "a", "min_tokens": -1}': "min_tokens=-1 must be a whole number of at least 0",
    '{"prompt": "a", "ignore_eos": 1}': "ignore_eos must be true or false, not 1",
    '{"prompt": "a", "stop_token_ids": 5}': "stop_token_ids must be a list of token ids, not 5",
    json.dumps({"prompt": "a", "stop": ["x"] * 65}): "stop has 65 texts: at most 64",
    json.dumps({"prompt": "a", "stop": "x" * 1025}): "a text of 1025 characters: at most 1024",
    '{"prompt": "a", "stop": [""]}': "none of them empty",
    '{"messages": "hi"}': "messages must be a list",
    "[" * 100_000: "nested more than 100 levels deep",
    json.dumps({"prompt": "x" * 63}): "max_target_length=64 leaves none",
}


def test_invalid_line_gets_an_error_and_the_others_go_on(tmp_path, folder, loaded, capsys):
    good = {"prompt": "good"}
    write_requests(tmp_path / "in.jsonl", good, *(line for bad in BAD for line in (bad, good)))
    assert batch(tmp_path, "max_target_length=64") == 0
    results = read_results(tmp_path)
    assert len(results) == 2 * len(BAD) + 1
    for number, (bad, expected) in enumerate(BAD.items()):
        result = results[2 * number + 1]
        assert result["finished"] == "error", bad
        assert expected in result["error"], bad
        assert "text" not in result
        assert results[2 * number + 2]["text"] == "doog"
    assert f"with errors {len(BAD)}" in " ".join(capsys.readouterr().out.split())


def test_bytes_that_are_not_text(tmp_path, folder, loaded):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "a", "id": "\\ud800"}')
    assert batch(tmp_path) == 0
    assert read_results(tmp_path) == {
        0: {
            "finished": "error",
            "error": "the line is not UTF-8: byte 12 does not continue a character",
        },
        1: {"id": "\ud800", "text": "a", "finished": "length"},
    }


def test_every_result_is_valid_json(tmp_path, folder, loaded):
    """Also of a file with a byte order mark, half surrogate pairs and nested ids."""
    lines = [
        '{"prompt": "a", "id": ' + "[" * 90 + "]" * 90 + "}",
        '{"prompt": "\\udfff", "id": "\\ud800"}',
        *BAD,
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n \n".join(lines).encode())
    assert batch(tmp_path, "max_target_length=64") == 0

    def refuse(text):
        raise AssertionError(text)

    written = (tmp_path / "out.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in written]
    assert sorted(record["index"] for record in records) == [
        3 * number for number in range(len(lines))
    ]
    assert {record["index"] for record in records if record["finished"] == "length"} == {0, 3}


@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "folder", "link to a device"])
def test_results_go_to_regular_files_only(kind, tmp_path, folder, loaded, capsys):
    write_requests(tmp_path / "in.jsonl", {"prompt": "a"})
    out = tmp_path / "out.jsonl"
    if kind == "device":
        out = Path("/dev/full")
    elif kind == "pipe":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    elif kind == "link to a device":
        out.symlink_to("/dev/full")
    else:
        socket.socket(socket.AF_UNIX).bind(str(out))
    command = [
        "batch",
        str(tmp_path / "in.jsonl"),
        str(out),
        "--model",
        str(folder),
        "jax_cache_dir=none",
    ]
    for more in ([], ["--overwrite"]):
        assert main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert "cannot take the results: it is no regular file" in error
        assert "Traceback" not in error
    with pytest.raises(ConfigError, match="no regular file"):
        ResultFile(out, {}, overwrite=False)


def test_full_disk_is_a_user_error(tmp_path, monkeypatch):
    path = write_requests(tmp_path / "in.jsonl", {"prompt": "a"})
    results = ResultFile(tmp_path / "out.jsonl", {}, overwrite=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError, match="cannot be written: No space left"):
        results.write(next(read_lines(path)), {"text": "a"})
    results.close()


def test_choices_are_one_line(tmp_path, folder, loaded):
    write_requests(
        tmp_path / "in.jsonl", {"prompt": "ab", "n": 3, "id": 7}, {"prompt": [9999], "n": 2}
    )
    assert batch(tmp_path) == 0
    results = read_results(tmp_path)
    assert results[0] == {"id": 7, "choices": [{"text": "ba", "finished": "length"}] * 3}
    assert results[1]["finished"] == "error"


def test_request_of_which_one_choice_fails(tmp_path, folder, loaded, monkeypatch):
    """As choices of a grammar may, while others follow it."""
    completions = FakeLLM.completions

    def fail_first_choice(self, requests):
        for each in completions(self, requests):
            is_failed = (each.index, each.choice) == (0, 0)
            yield replace(each, finish_reason="error", error="stuck") if is_failed else each

    monkeypatch.setattr(FakeLLM, "completions", fail_first_choice)
    write_requests(tmp_path / "in.jsonl", {"prompt": "ab", "n": 3}, {"prompt": "cd"})
    assert batch(tmp_path) == 0
    results = read_results(tmp_path)
    assert results[0] == {"finished": "error", "error": "stuck"}
    assert results[1]["text"] == "dc"


def test_log_probabilities_come_with_token_ids(tmp_path, folder, loaded):
    write_requests(tmp_path / "in.jsonl", {"prompt": "ab"})
    assert batch(tmp_path, "return_log_prob=true") == 0
    (result,) = read_results(tmp_path).values()
    assert result == {
        "text": "ba",
        "ids": [101, 100],
        "log_probs": [-0.5, -1.5],
        "finished": "length",
    }


def test_requests_are_read_as_they_are_needed(tmp_path, folder, loaded, monkeypatch):
    """A job that stops after its first result has not read the whole file."""
    path = write_requests(tmp_path / "in.jsonl", *({"prompt": "a"} for _ in range(100)))
    seen = []

    def spy(path):
        for line in read_lines(path):
            seen.append(line.index)
            yield line

    monkeypatch.setattr("maxtext.cli.batch.read_lines", spy)
    monkeypatch.setattr(FakeLLM, "complete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert batch(tmp_path) == 130
    assert len(seen) <= 4
    assert path.exists()


def test_without_a_tokenizer_prompts_of_ids_are_completed(tmp_path, folder, loaded, monkeypatch):
    monkeypatch.setattr(FakeLLM, "tokenizer_class", None)
    write_requests(tmp_path / "in.jsonl", {"prompt": [1, 100]}, {"prompt": "a"})
    assert batch(tmp_path) == 0
    results = read_results(tmp_path)
    assert results[0]["ids"] == [100]
    assert "came without a tokenizer" in results[1]["error"]


def test_a_second_run_has_nothing_to_do(tmp_path, folder, loaded, capsys):
    write_requests(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS))
    assert batch(tmp_path) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    assert batch(tmp_path) == 0
    assert len(loaded) == 1  # the second run does not even load the model
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert "all 7 requests" in capsys.readouterr().out


def test_appended_lines_are_completed(tmp_path, folder, loaded):
    write_requests(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS[:4]))
    assert batch(tmp_path) == 0
    write_requests(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS))
    assert batch(tmp_path) == 0
    assert len(loaded[-1].requests) == 3
    assert len(read_results(tmp_path)) == 7


def test_changed_requests_or_settings_are_refused(tmp_path, folder, loaded, capsys):
    path = write_requests(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS))
    assert batch(tmp_path) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    write_requests(path, *({"prompt": text} for text in ["one", "TWO", *PROMPTS[2:]]))
    assert batch(tmp_path) == 2
    assert (
        "has the results of other requests than these, line 2 has changed"
        in capsys.readouterr().err
    )
    write_requests(path, *({"prompt": text} for text in PROMPTS[:5]))
    assert batch(tmp_path) == 2
    assert "some are missing" in capsys.readouterr().err
    write_requests(path, *({"prompt": text} for text in PROMPTS))
    assert batch(tmp_path, "max_target_length=100") == 2
    assert "another model or of other settings" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert batch(tmp_path, "max_target_length=100", "--overwrite") == 0
    assert len(read_results(tmp_path)) == 7
    assert len(loaded) == 2


def test_invalid_configuration_keeps_the_results(tmp_path, folder, loaded, monkeypatch):
    write_requests(tmp_path / "in.jsonl", {"prompt": "a"})
    assert batch(tmp_path) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    assert batch(tmp_path, "--overwrite", "stepz=1") == 2

    def broken(*_, **__):
        raise UserError("no such weights")

    monkeypatch.setattr(FakeLLM, "from_config", broken)
    assert batch(tmp_path, "--overwrite") == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_results_truncated_anywhere(tmp_path):
    """However many bytes have reached the file, the next run completes it without duplicates."""
    path = write_requests(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS[:3]))
    out = tmp_path / "out.jsonl"

    def resume():
        results = ResultFile(out, {"a": 1}, overwrite=False)
        left = results.verify(path)
        results.begin()
        for line in read_lines(path):
            if not results.has(line):
                results.write(line, {"text": "é" * line.index})
        results.close()
        return left

    resume()
    complete = out.read_bytes()
    expected = read_results(tmp_path)
    assert len(expected) == 3
    for size in range(len(complete) + 1):
        out.write_bytes(complete[:size])
        assert resume() == (size < len(complete))
        assert read_results(tmp_path) == expected
        assert out.read_bytes().startswith(complete[: complete[:size].rfind(b"\n") + 1])


def test_other_file_is_not_touched(tmp_path, folder, loaded, capsys):
    write_requests(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "out.jsonl").write_text('{"index": 0}\n')
    assert batch(tmp_path) == 2
    assert "line 1 of" in (error := capsys.readouterr().err)
    assert "is no result of `maxtext batch`" in error
    assert (tmp_path / "out.jsonl").read_text() == '{"index": 0}\n'


def test_only_one_writer(tmp_path):
    first = ResultFile(tmp_path / "out.jsonl", {}, overwrite=False)
    with pytest.raises(UserError, match="another `maxtext batch` is writing"):
        ResultFile(tmp_path / "out.jsonl", {}, overwrite=True)
    first.close()
    ResultFile(tmp_path / "out.jsonl", {}, overwrite=False).close()


def test_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(tmp_path / "file" / "out.jsonl", {}, overwrite=False)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "name a model and two files"),
        (["in.jsonl", "out.jsonl"], "which model? maxtext batch MODEL IN.jsonl OUT.jsonl"),
        (["in.jsonl", "--model", "m"], "name a model and two files"),
        (["in.jsonl", "out.jsonl", "--model", "m", "--fast"], "unknown option '--fast'"),
        (["nowhere.jsonl", "out.jsonl", "--model", "m"], "there is no file nowhere.jsonl"),
        (
            ["in.jsonl", "in.jsonl", "--model", "m"],
            "cannot take the results: it is the file of requests",
        ),
        (["in.jsonl", ".", "--model", "m"], "cannot take the results: it is no regular file"),
        (["in.jsonl", "out.jsonl", "--model", "m"], "neither a folder nor the name of a model"),
        (
            ["in.jsonl", "out.jsonl", "--model", "model", "prompt=a"],
            "prompt=a (command line) would do nothing",
        ),
        (["in.jsonl", "out.jsonl", "--model", "model", "multi_sampling=true"], "repeat the line"),
        (["in.jsonl", "out.jsonl", "--model", "model", "loose"], "name a model and two files"),
    ],
)
def test_errors(args, expected, tmp_path, folder, loaded, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_requests(tmp_path / "in.jsonl", {"prompt": "a"})
    assert main(["batch", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected in printed.err
    assert not (tmp_path / "out.jsonl").exists()


CHILD = """
import sys, time
import pytest
from tests.cli import fake_llm
from maxtext.cli.main import main

fast = fake_llm.FakeLLM.complete
def slow(self, index, request):
    time.sleep(0.005)
    return fast(self, index, request)

with pytest.MonkeyPatch.context() as monkeypatch:
    fake_llm.install(monkeypatch)
    monkeypatch.setattr(fake_llm.FakeLLM, "complete", slow)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_repeatedly(tmp_path, folder, loaded):
    """kill -9 twice: the last run keeps every result of the others and adds the missing ones."""
    write_requests(
        tmp_path / "in.jsonl", *({"prompt": f"number {number}"} for number in range(200))
    )
    names = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    command = [
        sys.executable,
        "-c",
        CHILD,
        "batch",
        *names,
        "--model",
        str(folder),
        "jax_cache_dir=none",
    ]
    out, before = tmp_path / "out.jsonl", b""
    root = Path(__file__).parents[2]
    for _ in range(2):
        child = subprocess.Popen(
            command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while (
            child.poll() is None
            and (out.stat().st_size if out.exists() else 0) < len(before) + 3000
        ):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        written = out.read_bytes()
        assert written.startswith(before[: before.rfind(b"\n") + 1])
        assert len(written) > len(before)
        before = written
    assert before.count(b"\n") < 200
    assert main([*command[3:]]) == 0
    assert read_results(tmp_path) == {
        number: {"text": f"number {number}"[::-1], "finished": "length"} for number in range(200)
    }


@pytest.mark.slow
def test_real_model(chat_model, greedy_ids, tmp_path):
    folder, llm = chat_model
    prompts = [[1, 7, 9], [1, *range(20, 40)], [1, 300], [1, 5, 5, 5, 5, 5, 5]]
    counts = [3, 5, 9, 6]
    records = [
        {"prompt": ids, "max_new_tokens": count} for ids, count in zip(prompts, counts, strict=True)
    ]
    write_requests(
        tmp_path / "in.jsonl",
        *records,
        {"prompt": [1, 400]},
        {"prompt": "the cat", "max_new_tokens": 4},
    )
    args = [
        "dtype=float32",
        "attention=dot_product",
        "matmul_precision=highest",
        "max_target_length=64",
    ]
    args += ["per_device_batch_size=2", "jax_cache_dir=none"]
    names = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    assert main(["batch", *names, "--model", str(folder), *args]) == 0
    results = read_results(tmp_path)
    for number, (ids, count) in enumerate(zip(prompts, counts, strict=True)):
        assert results[number]["ids"] == greedy_ids(ids, count)[len(ids) :]
    assert "outside the vocabulary" in results[4]["error"]
    ids = llm.tokenizer.encode_prompt("the cat")
    assert results[5]["text"] == llm.tokenizer.decode(greedy_ids(ids, 4)[len(ids) :])
