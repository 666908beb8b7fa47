"""A server under mixed load for a while: does it grow, and does it ever fail?

    python benchmarks/soak.py [--minutes 5] [--warmup 3] [--streams 12] [--seed 0]
                              [--max-programs 6]

Starts `maxtext serve` of a tiny model with random weights, with sizes that need few programs, and
with too few KV blocks for all slots, so that sequences are preempted. The server keeps
`--max-programs` compiled programs of prefill and of decode, fewer than the requests need, so that
programs are dropped and compiled again all the time. Sends streamed and whole completions, chats,
requests with grammars, long texts, large bodies, requests whose client leaves, and bad requests,
first for the warm-up, then for the measured minutes. Every ten seconds it prints resident memory,
file descriptors, threads and compiled programs of the server, and what was sent. The exit code is 1
if a status is not the expected one, if a 5xx comes, if KV blocks are in use at the end, if there
are more programs than may be, or if memory, descriptors or threads have grown: their maximum in the
second half of the measured time exceeds that in the first half by more than 5% and 16 MiB, 8
descriptors or 2 threads.

With JAX_COMPILATION_CACHE_DIR and JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 in the environment,
a second run reads programs instead of compiling them.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from maxtext.diagnostics.load.client import Client, Connection, RequestRecord, Target

KEY = "soak"
SAMPLE_SECONDS = 10.0
LIMITS = {"MiB": (1.05, 16), "descriptors": (1.0, 8), "threads": (1.0, 2)}
MODEL = [
    *("model_name=qwen3-0.6b", "override_model_config=true", "base_emb_dim=32"),
    *("base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=16", "base_mlp_dim=48"),
    *("base_num_decoder_layers=1", "vocab_size=290", "tokenizer_path=byte"),
    *("max_target_length=64", "per_device_batch_size=4", "dtype=float32", "weight_dtype=float32"),
    *("attention=paged", "pagedattn_tokens_per_page=8", "pagedattn_num_pages=28"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
SERVER = """
import sys
from maxtext.cli import entry
from maxtext.inference.engine import program_cache
program_cache.MAX_PROGRAMS = int(sys.argv.pop(1))
entry.entry()
"""
BAD = [  # body, status
    (b"{", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": []}', 400),
    (b'{"prompt": "a", "max_tokens": 100000}', 400),
    (b'{"prompt": "a", "temperature": -1}', 400),
    (b'{"prompt": "a", "model": "other"}', 404),
    (b'{"prompt": "a", "structured_outputs": {"regex": "("}}', 400),
    (b"[" * 100000, 400),
    (b'{"prompt": "a", "unknown": [' + b"[]," * 200000 + b"[]]}", 400),
    (b'{"prompt": "' + b"a" * 4000000 + b'"}', 400),
    (b'{"prompt": "' + b"a" * 5000000 + b'"}', 413),
]


def start_server(log, max_programs):
    """(process, address) of `maxtext serve` on a free port."""
    command = [sys.executable, "-c", SERVER, str(max_programs), "serve", "qwen3-0.6b"]
    command += ["--port", "0"]
    process = subprocess.Popen([*command, "--api-key", KEY, *MODEL], stdout=log, stderr=log)
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"at (http://\S+)/v1 ", Path(log.name).read_text())
        if found:
            return process, found[1]
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"the server did not start:\n{Path(log.name).read_text()[-2000:]}")


def sample(pid):
    """Resident MiB, file descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {
        "MiB": int(numbers["VmRSS"]) / 1024,
        "descriptors": descriptors,
        "threads": int(numbers["Threads"]),
    }


class Soak:
    """Streams that send random requests until `end`; counts what they sent and what was wrong."""

    def __init__(self, target, seed, end):
        self.target = target
        self.client = Client(target, timeout=300)
        self.random = random.Random(seed)
        self.end = end
        self.counts = Counter()
        self.problems = []

    async def run_stream(self):
        kinds = [self.complete, self.complete, self.chat, self.constrain, self.leave, self.fail]
        kinds += [self.truncate]
        while time.monotonic() < self.end:
            kind = self.random.choice(kinds)
            await kind()
            self.counts[kind.__name__] += 1

    def body(self):
        letters = self.random.choices("abcdef ", k=self.random.randint(1, 12))
        return {
            "prompt": "".join(letters),
            "max_tokens": self.random.randint(1, 48),
            "temperature": self.random.choice([0, 1]),
            "n": self.random.choice([1, 1, 1, 2]),
            "stream": self.random.random() < 0.5,
        }

    async def post(self, path, body, expected=200):
        record = await self.client.post(path, body, RequestRecord(0, 0))
        if record.status != expected or (record.error and expected == 200):
            text = f"{path}: {record.status} {record.error} {record.message}"
            self.problems.append(text)
        return record

    async def complete(self):
        extra = self.random.choice([{}, {"stop": ["a"]}, {"echo": True}, {"ignore_eos": True}])
        await self.post("/v1/completions", {**self.body(), **extra})

    async def chat(self):
        # The model has no chat template.
        messages = [{"role": "user", "content": "hello"}]
        await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5}, 400)

    async def constrain(self):
        choice = {"choice": [self.random.choice("abc") * 3, "yes", "no"]}
        schema = {"name": "value", "schema": SCHEMA}
        extra = self.random.choice(
            [
                {"response_format": {"type": "json_schema", "json_schema": schema}},
                {"structured_outputs": choice},
            ]
        )
        await self.post("/v1/completions", {**self.body(), "max_tokens": 48, **extra})

    async def truncate(self):
        """The end of a text of up to 2 MB."""
        text = "".join(self.random.choices("abcdef ", k=1000)) * self.random.randint(1, 2000)
        await self.post("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 8})

    async def leave(self):
        """Close the connection while the request waits or runs."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.target.host, self.target.port)
        body = {**self.body(), "max_tokens": 48, "ignore_eos": True}
        data = self.target.encode("POST", "/v1/completions", body)
        connection.transport.write(data[: self.random.choice([len(data), len(data) // 2])])
        await asyncio.sleep(self.random.random() / 2)
        connection.transport.abort()

    async def fail(self):
        data, status = self.random.choice(BAD)
        head = self.target.encode("POST", "/v1/completions", {})[:-2].replace(
            b"Content-Length: 2", b"Content-Length: %d" % len(data)
        )
        record = await self.client.send(head + data, RequestRecord(0, 0))
        if record.status != status:
            self.problems.append(f"{data[:60]!r}: {record.status} instead of {status}")


async def soak(process, target, options):
    """(samples, problems) of the whole time."""
    start = time.monotonic() + options.warmup * 60
    run = Soak(target, options.seed, start + options.minutes * 60)
    streams = asyncio.gather(*(run.run_stream() for _ in range(options.streams)))
    samples = []
    while not streams.done():
        await asyncio.wait({streams}, timeout=SAMPLE_SECONDS)
        newest = {"seconds": round(time.monotonic() - start), **sample(process.pid)}
        newest["programs"] = await num_programs(run.client)
        samples += [newest] if newest["seconds"] >= 0 else []
        shown = ", ".join(f"{value:.0f} {name}" for name, value in newest.items())
        print(f"{shown}; {dict(run.counts)}, {len(run.problems)} problems", flush=True)
    streams.result()
    return samples, run.problems + await check_idle(run.client)


async def num_programs(client):
    text = bytes((await client.get("/metrics")).body).decode()
    return float(re.search(r"^maxtext:compiled_programs\{.*\} (\S+)", text, re.M)[1])


async def check_idle(client):
    """Nothing runs or holds blocks any more, and no response was a 5xx."""
    end = time.monotonic() + 15
    while True:
        text = bytes((await client.get("/metrics")).body).decode()
        gauges = re.findall(r"^maxtext:(num_requests_\w+|kv_pages_in_use)\{.*\} (\S+)", text, re.M)
        held = {name: value for name, value in gauges if float(value)}
        if not held or time.monotonic() > end:
            break
        await asyncio.sleep(0.5)
    failed = re.findall(r'^maxtext:http_requests_total\{.*status="5\d\d".*', text, re.M)
    problems = [f"left at the end: {held}"] if held else []
    return problems + [f"a 5xx: {line}" for line in failed]


def growth(samples, max_programs):
    """Sentences about what grew between the first and the second half, or is too large."""
    num_compiled = max(each["programs"] for each in samples)
    if num_compiled > 2 * max_programs:  # of prefill and of decode
        yield f"{num_compiled:.0f} programs are compiled"
    half = len(samples) // 2
    first, last = samples[:half] or samples, samples[half:]
    for name, (factor, addition) in LIMITS.items():
        before = max(each[name] for each in first)
        after = max(each[name] for each in last)
        if after > max(before * factor, before + addition):
            yield f"{name} grew from {before:.0f} to {after:.0f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--warmup", type=float, default=3, help="minutes")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-programs", type=int, default=6, help="of prefill and of decode")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process, address = start_server(log, options.max_programs)
        try:
            target = Target.from_url(address, KEY)
            samples, problems = asyncio.run(soak(process, target, options))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        lines = Path(log.name).read_text()
    problems += growth(samples, options.max_programs)
    if code:
        problems.append(f"the server ended with the code {code}")
    if "Traceback" in lines:
        problems.append(f"the log has a traceback: {lines[lines.index('Traceback') :][:2000]}")
    for problem in problems[:20]:
        print(f"problem: {problem}")
    print(json.dumps({"first": samples[0], "last": samples[-1], "problems": len(problems)}))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
