"""`maxtext serve`: flags, errors before weights are loaded, and the life of the process."""

import json
import logging
import math
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from maxtext.cli import generation, options
from maxtext.cli.arguments import parse
from maxtext.cli.commands import COMMANDS
from maxtext.cli.main import main
from maxtext.cli.serve import ServeArguments, print_ready, read_arguments
from maxtext.cli.terminal import CountBar
from maxtext.cli.vllm_flags import KEYS, REFUSED, SWITCHES
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.sampling.logprobs import MAX_LOGPROBS
from maxtext.inference.server.app import ServerOptions
from maxtext.inference.text.parsers import reasoning, tool_calls

TINY = ["model_name=qwen3-0.6b", "override_model_config=true", "base_emb_dim=32"]
TINY += ["base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=16", "base_mlp_dim=48"]
TINY += ["base_num_decoder_layers=1", "vocab_size=290", "tokenizer_path=byte"]
TINY += ["max_target_length=256", "per_device_batch_size=2", "attention=dot_product"]
READY = re.compile("serving qwen3-0.6b at http")
# Browsers send none of them, so they would match nothing.
WRONG_HOSTS = ["http://page.test", "page.test/", "*.page.test", "page.test:x", "a b", "a@b"]
WRONG_ORIGINS = ["page.test", "http://page.test/", "http://page.test/chat", "http://Page.test"]


def parse_arguments(args) -> ServeArguments:
    return read_arguments(parse("serve", COMMANDS["serve"], args))


def test_harmony_has_its_former_name():
    parsed = parse_arguments(["m", "--tool-call-parser=gpt_oss", "--reasoning-parser=gpt_oss"])
    assert (parsed.tool_parser, parsed.reasoning_parser) == ("harmony", "harmony")


def test_options_name_what_the_server_has():
    """Help must not import the server, so options.py repeats its names and limits."""
    form = COMMANDS["serve"].forms[""]
    assert form.find("--tool-call-parser").type.choices == (*tool_calls.TOOL_PARSERS, "gpt_oss")
    assert form.find("--reasoning-parser").type.choices == (*reasoning.REASONING_PARSERS, "gpt_oss")
    assert options.MAX_LOGPROBS == MAX_LOGPROBS
    parsed = parse_arguments(["m", "--allowed-hosts", "*", "--host", "localhost"])
    assert parsed.options == ServerOptions(
        api_keys=[], cors_origins=[], allowed_hosts=("*",), own_hosts=("localhost",)
    )


def test_defaults(monkeypatch):
    monkeypatch.setenv("MAXTEXT_API_KEY", "from-environment")
    parsed = parse_arguments(["models/tiny", "dtype=float32"])
    assert (parsed.host, parsed.port, parsed.uds) == ("127.0.0.1", 8000, None)
    assert (parsed.names, parsed.overrides) == (
        ["tiny"],
        ["load_parameters_path=models/tiny", "dtype=float32"],
    )
    assert parsed.options.api_keys == ["from-environment"]
    assert parsed.options.cors_origins == []
    assert parsed.uses_generation_config
    assert parsed.options.has_page


def test_flags():
    parsed = parse_arguments(
        [
            "models/tiny",
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k=1",
            "--api-key=k2",
            "--cors",
            "http://page.test",
            "--port",
            "0",
            "--max-queue",
            "7",
            "--log-requests",
            "--no-page",
            "--adapter",
            "lora",
            "--request-timeout",
            "0",
            "--no-tools",
            "--log-prompts",
            "--tool-call-parser",
            "mistral",
            "--reasoning-parser=none",
            "--allow-lora-updates",
            "--lora-root",
            "/",
            "--default-chat-template-kwargs",
            '{"enable_thinking":false}',
            "--generation-config",
            "none",
            "attention=paged",
        ]
    )
    assert (parsed.names, parsed.port, parsed.max_queue) == (["a", "b"], 0, 7)
    assert parsed.options.api_keys == ["k=1", "k2"]
    assert parsed.options.cors_origins == ["http://page.test"]
    assert parsed.options.log_requests
    assert not parsed.options.has_page
    assert parsed.options.log_prompts
    assert not parsed.options.allows_tools
    assert (parsed.tool_parser, parsed.reasoning_parser) == ("mistral", "none")
    assert parsed.options.adapter_root == Path("/")
    assert parsed.options.request_timeout == 0
    assert parsed.template_defaults == {"enable_thinking": False}
    assert not parsed.uses_generation_config
    assert parsed.overrides[1:] == ["attention=paged", "lora_input_adapters_path=lora"]


def test_allowed_hosts(monkeypatch):
    """Host may also be the name that --host gives, and the machine's own name where others reach
    it; no browser reaches a unix socket. These allow no page of another port.
    """
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    hosts = {
        (): ((), ("127.0.0.1",)),
        ("--host", "GPU.test"): ((), ("gpu.test", "box")),
        ("--host", "0.0.0.0", "--allowed-hosts", "A.test", ".b.test:81", "dtype=float32"): (
            ("a.test", ".b.test:81"),
            ("0.0.0.0", "box"),
        ),
        ("--uds", "s"): ((), ("*",)),
        ("--uds", "s", "--allowed-hosts", "a.test"): (("a.test",), ()),
    }
    for flags, expected in hosts.items():
        options = parse_arguments(["m", *flags]).options
        assert (options.allowed_hosts, options.own_hosts) == expected


def test_flags_of_vllm_are_keys():
    """By the meaning that vLLM's documentation gives them."""
    line = (
        "m --max-model-len 4096 --tensor_parallel_size=2 --max-num-seqs 8 --dtype half "
        "--chat-template t.jinja --tokenizer tok --enable-prefix-caching --quantization int8 "
        "--kv-cache-dtype int8 --gpu-memory-utilization 0.8 "
        "--enable-lora --max-loras 3 --lora-modules a=x b=y --enable-auto-tool-choice "
        "--generation-config vllm attention=paged"
    )
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    parsed = parse_arguments([*line.split(), "--speculative-config", drafts])
    assert set(parsed.overrides) == {
        "load_parameters_path=m",
        "max_target_length=4096",
        "ici_tensor_parallelism=2",
        "per_device_batch_size=8",
        "dtype=float16",
        "chat_template_path=t.jinja",
        "tokenizer_path=tok",
        "enable_prefix_caching=true",
        "quantization=int8",
        "quantize_kvcache=true",
        "kv_quant_dtype=int8",
        "gpu_memory_utilization=0.8",
        "max_adapters=3",
        "attention=paged",
        "speculative_method=ngram",
        "num_speculative_tokens=3",
        "prompt_lookup_max=2",
    }
    assert parsed.adapters == {"a": "x", "b": "y"}
    assert not parsed.uses_generation_config
    assert parse_arguments(["--model", "org/m", "--dtype=auto"]).names == ["m"]


def test_a_draft_model_by_the_flag_of_vllm():
    parsed = parse_arguments(["m", "--speculative-config", '{"model": "org/d"}'])
    assert {"speculative_method=draft", "speculative_model_path=org/d"} <= set(parsed.overrides)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1]", "takes a JSON object"),
        ("{", "takes a JSON object"),
        ('{"method": "ngram", "quantization": "fp8"}', "no entry 'quantization' here"),
        ('{"num_speculative_tokens": [4]}', "num_speculative_tokens must be a number or a text"),
    ],
)
def test_wrong_speculative_config(value, message):
    with pytest.raises(ConfigError, match="--speculative-config") as error:
        parse_arguments(["m", "--speculative-config", value])
    assert message in str(error.value)


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_vllm_without_a_meaning_name_what_to_use(flag):
    with pytest.raises(ConfigError) as error:
        parse_arguments(["m", flag, "1"])
    assert str(error.value).startswith(f"{flag} is vLLM's and does nothing here: ")
    assert len(error.value.problems) == 1


def test_keys_of_vllm_flags_exist():
    names = [*KEYS.values(), *(setting.partition("=")[0] for setting in SWITCHES.values())]
    assert set(names) <= MaxTextConfig.model_fields.keys()


def test_names_of_adapters():
    """A key of base.yml ends them."""
    args = ["m", "--lora", "a=x/1", "B=x/2=3", "dtype=float32", "--lora=c=d", "attention=paged"]
    parsed = parse_arguments(args)
    assert parsed.adapters == {"a": "x/1", "B": "x/2=3", "c": "d"}
    assert parsed.overrides[1:] == ["dtype=float32", "attention=paged"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "which model"),
        (["--port", "1"], "which model"),
        (["x", "--port", "70000"], "0 to 65535"),
        (["x", "--port", "a"], "whole number"),
        (["x", "--max-queue", "-1"], "whole number"),
        (["x", "--uds", "s", "--port", "1"], "--uds and --port exclude each other"),
        (["x", "--generation-config", "yes"], "takes auto or none"),
        (["x", "--default-chat-template-kwargs", "[]"], "JSON object"),
        (["x", "--default-chat-template-kwargs", '{"tools": []}'], "may not set tools"),
        (["x", "--reasoning-parser", "deep"], "--reasoning-parser takes think or"),
        (["x", "--lora", "a"], "NAME=DIR"),
        (["x", "--lora", "x=d"], "name of the model"),
        (["x", "--lora", "a=d", "--adapter", "e"], "exclude each other"),
        (["x", "--allow-lora-updates"], "needs --lora-root"),
        (["x", "--allow-lora-updates", "--lora-root", "/nowhere"], "no folder"),
        *((["x", "--cors", origin], "takes origins") for origin in WRONG_ORIGINS),
        *((["x", "--allowed-hosts", host], "takes names") for host in WRONG_HOSTS),
        (["x", "--root-path", "model"], "a path such as /model"),
        (["x", "--root-path", "/model/"], "a path such as /model"),
        (["x", "--api-key", "schlüssel"], "may not have"),
        (["x", "--workers", "2"], "unknown option '--workers'"),
        (["x", "y"], "unknown argument 'y'"),
    ],
)
def test_wrong_flags(args, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_arguments(args)


def test_errors_come_before_weights_are_loaded(tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "qwen3-0.6b", "--port", str(port), *TINY]) == 2
    assert "cannot be opened" in capsys.readouterr().err
    assert main(["serve", "qwen3-0.6b", "--ssl-certfile", "x", *TINY]) == 2
    assert "both or neither" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "missing")]) == 2
    assert "neither a folder nor" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert main(["serve", "qwen3-0.6b", "--uds", str(tmp_path / "file"), *TINY]) == 2
    assert "no socket" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_full_disk_does_not_end_the_server(monkeypatch):
    """Nor does a log that nobody reads: neither in the first lines nor in later ones."""
    model = SimpleNamespace(
        engine=SimpleNamespace(engine=SimpleNamespace(cache_config=SimpleNamespace(slots=4))),
        max_length=256,
        sampling_defaults={},
    )
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(sys, "stderr", full)
        print_ready(parse_arguments(["models/tiny"]), model, listener)
        generation.note("the tokenizer is that of the folder")
        bar = CountBar()
        bar.logged_at = -math.inf
        bar(1, 2, "compiling")
        handler = logging.StreamHandler(full)
        record = logging.makeLogRecord({"msg": "draining, 0 running"})
        for _ in range(1000):
            handler.handle(record)
        monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        full.close()


SLOW_LOAD = """
import sys, time
from maxtext.cli import entry, serve
def load_session(*args, **options):
    print("loading", flush=True)
    time.sleep(60)
serve.load_session = load_session
entry.entry()
"""


# The command, or a library that it imports, takes long to import.
SLOW_IMPORT = """
import sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            print("loading", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Finder())
from maxtext.cli import entry
entry.entry()
"""
SLOW_STARTS = {
    "weights": SLOW_LOAD,
    "command": SLOW_IMPORT.replace("MODULE", "'maxtext.cli.generation'"),
    "library": SLOW_IMPORT.replace("MODULE", "'starlette'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", SLOW_STARTS.values(), ids=SLOW_STARTS)
def test_sigterm_while_the_model_is_loading_is_no_failure(program, tmp_path):
    command = [sys.executable, "-c", program, "serve", "qwen3-0.6b", *TINY]
    process = subprocess.Popen(
        [*command, "--uds", str(tmp_path / "socket")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert errors.splitlines()[-1] == "stopped by SIGTERM while the model was loading"
        assert "Traceback" not in errors
        assert process.returncode == 0
        assert not (tmp_path / "socket").exists()
    finally:
        process.kill()
        process.wait()


# A prefill takes as long as a program that is compiled.
SLOW_PREFILL = """
import sys, time
from maxtext.cli import entry
from maxtext.inference.engine.executor import Executor
def prefill(*args):
    print("compiling", flush=True)
    time.sleep(600)
Executor.prefill = prefill
entry.entry()
"""


@pytest.mark.slow
def test_sigterm_while_a_program_is_compiled(tmp_path):
    """All requests get an error of the API, and the process ends without its engine."""
    keys = [key.replace("batch_size=2", "batch_size=1") for key in TINY]
    command = [sys.executable, "-c", SLOW_PREFILL, "serve", "qwen3-0.6b", *keys]
    command += ["--port", "0", "--drain-timeout", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"at (http\S+)", next(filter(READY.match, process.stderr)))[1]
        with ThreadPoolExecutor(3) as threads:
            body = {"prompt": "ab", "max_tokens": 5}
            calls = [
                threads.submit(httpx.post, f"{address}/completions", json=body, timeout=60)
                for _ in range(3)
            ]
            assert process.stdout.readline() == "compiling\n"
            metrics = address.replace("/v1", "/metrics")
            while not re.search("num_requests_waiting.* 3.0", httpx.get(metrics, timeout=60).text):
                assert not any(call.done() for call in calls)
            process.send_signal(signal.SIGTERM)
            for call in calls:
                response = call.result()
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "draining"
        _, errors = process.communicate(timeout=20)
        assert "draining, 1 running; dropped 2 waiting" in errors
        assert "Traceback" not in errors
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_sigterm_finishes_what_runs():
    """A stream that runs when the signal comes ends with [DONE], and the exit code is 0."""
    command = [sys.executable, "-m", "maxtext", "serve", "qwen3-0.6b", "--port", "0", *TINY]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        ready = next(
            (line for line in process.stderr if line.startswith("serving qwen3-0.6b at http")), ""
        )
        address = re.search(r"at (http://127\.0\.0\.1:\d+/v1) \(2 at a time, 256 tokens", ready)
        assert address, ready
        body = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{address[1]}/completions", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert first.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
