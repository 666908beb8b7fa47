"""What the server costs: tokens a second through HTTP against the same requests offline.

    python benchmarks/serve.py [--model tiny] [--streams 64] [--requests 256] [--rounds 3]
    python benchmarks/serve.py --model 8b --streams 512 --requests 512 --rounds 1

The model has random weights: `tiny` in float32, for CPUs, or the shape of an 8B model in bfloat16,
as in decode.py. It is loaded once, and warmed up as a server is on a GPU. Rounds
alternate between `LLM.completions` of all requests and the same requests by `maxtext bench serve`,
a process of its own, which sends them at once; the first round of each is not counted. Then:

- tiny: single requests, one after the other; the overhead is the time to the first token less that
  of the engine in the same process.
- 8b: Poisson arrivals at 70% of the rate of requests that the server reached.

Prints one JSON line: tokens/s of both, the ratio of medians, and latencies in milliseconds. The
server needs the extra `serve`, and no network but the loopback address.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from decode import SHAPES, load

from maxtext.diagnostics.load.generator import ServerInfo, Workload, request_bodies
from maxtext.inference import AsyncEngine, GenerationRequest, SamplingParams
from maxtext.inference.server.app import ServerOptions, build_app
from maxtext.inference.server.lifecycle import HttpServer, bind, tune_interpreter
from maxtext.inference.server.model import ServedModel

LENGTHS = {  # of prompts and completions
    "tiny": ((64, 64), (64, 64)),  # few shapes to compile
    "8b": ((64, 1024), (64, 512)),
}
PAGE_TOKENS = 64
LOAD = 0.7  # of the rate at saturation
START = time.monotonic()


def note(text):
    print(f"{time.monotonic() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


def write_tokenizer(folder, vocab_size):
    """A byte-level vocabulary, as Llama 3 has one: each id above those of bytes is a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    for index in range(len(vocabulary), vocab_size):
        vocabulary[f"Ġw{index}"] = index
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def load_model(name, slots, folder, keys):
    write_tokenizer(folder, SHAPES[name]["vocabulary"])
    # Pages for the average request and one more, as decode.py has them.
    average = sum(map(sum, LENGTHS[name])) // 2
    pages = {
        "attention": "paged",
        "pagedattn_tokens_per_page": PAGE_TOKENS,
        "pagedattn_num_pages": (average // PAGE_TOKENS + 2) * slots,
    }
    if name == "tiny":  # bfloat16 is slow on CPUs
        pages |= {"dtype": "float32", "weight_dtype": "float32", "max_target_length": 512}
    settings = {"per_device_batch_size": slots, "tokenizer_path": str(folder), **pages, **keys}
    return load(name, **settings)


def generation_requests(workload, vocab_size):
    """The requests that the load generator sends."""
    server = ServerInfo("", None, tuple(range(vocab_size)))
    bodies = request_bodies(workload, server)
    for _, body in zip(range(workload.num_requests), bodies, strict=False):
        params = SamplingParams(max_new_tokens=body["max_tokens"], ignore_eos=True)
        yield GenerationRequest(body["prompt"], params)


def offline_rate(llm, workload):
    """New tokens per second of `LLM.completions`."""
    requests = list(generation_requests(workload, llm.config.vocab_size))
    start = time.perf_counter()
    tokens = sum(len(each.token_ids) for each in llm.completions(iter(requests)))
    seconds = time.perf_counter() - start
    assert tokens == sum(request.params.max_new_tokens for request in requests)
    return tokens / seconds


def engine_first_token_seconds(llm, workload):
    """The time to the first token of each request alone."""
    slots, length = llm.config.global_batch_size_to_load, llm.config.max_target_length
    for request in generation_requests(workload, llm.config.vocab_size):
        start = time.perf_counter()
        deltas = llm.run(iter([request]), slots, length)
        next(delta for delta in deltas if delta.token_ids)
        yield time.perf_counter() - start
        list(deltas)


@contextlib.contextmanager
def serving(llm, max_queue):
    """The address of a server of this model."""
    engine = AsyncEngine(llm, max_queue=max_queue)
    model = ServedModel(llm, engine, llm.tokenizer, ["benchmark"])
    listener = bind("127.0.0.1", 0)
    server = HttpServer(build_app(model, ServerOptions()), listener)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        engine.close()


def run_load(url, workload, *flags):
    """The report of `maxtext bench serve`, in its own process."""
    names = {"--streams": workload.streams, "--rate": workload.rate}
    names |= {"--requests": workload.num_requests, "--duration": workload.duration}
    names |= {"--seed": workload.seed}
    for option, (low, high) in (
        ("--prompt-tokens", workload.prompt_tokens),
        ("--new-tokens", workload.new_tokens),
    ):
        names[option] = f"{low}-{high}"
    args = [str(item) for pair in names.items() if pair[1] is not None for item in pair]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "maxtext", "bench", "serve", "--url", url, *args]
        subprocess.run([*command, "--json", report, *flags], check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())


def children_cpu_seconds():
    """Of processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def warm_up(llm, options, lengths):
    """Compile prefill for 1, 2, 4 … prompts: which of them arrive together differs by round."""
    for exponent in range(options.streams.bit_length()):
        workload = Workload(
            num_requests=1 << exponent,
            prompt_tokens=lengths[0],
            new_tokens=(2, 2),
            seed=1000 + exponent,
        )
        offline_rate(llm, workload)


def compare(llm, options, lengths):
    """tokens/s offline and through the server, in alternating rounds after one to warm up."""
    rates = {"offline": [], "server": []}
    cpu_seconds = {"offline": [], "server": [], "load generator": []}
    requests_per_second = []
    for round_index in range(options.rounds + 1):
        workload = Workload(
            rate=float("inf"),
            num_requests=options.requests,
            prompt_tokens=lengths[0],
            new_tokens=lengths[1],
            seed=round_index,
        )
        start = time.process_time()
        offline = offline_rate(llm, workload)
        middle, children = time.process_time(), children_cpu_seconds()
        with serving(llm, max_queue=options.requests) as url:
            report = run_load(url, workload)
        end = time.process_time()
        note(f"offline {offline:,.0f} tokens/s, server {report['tokens_per_second']:,.0f}")
        if round_index or not options.rounds:
            rates["offline"].append(offline)
            rates["server"].append(report["tokens_per_second"])
            cpu_seconds["offline"].append(middle - start)
            cpu_seconds["server"].append(end - middle)
            cpu_seconds["load generator"].append(children_cpu_seconds() - children)
            requests_per_second.append(report["requests_per_second"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["server"] / medians["offline"], 3),
        "ratio_by_round": [
            round(server / offline, 3) for offline, server in zip(*rates.values(), strict=True)
        ],
        "cpu_seconds": {
            name: round(statistics.median(values), 2) for name, values in cpu_seconds.items()
        },
    }, statistics.median(requests_per_second)


def first_token_overhead(llm, options, lengths):
    """Median milliseconds to the first token of single requests, in alternating groups."""
    engine, server = [], []
    for group in range(options.rounds + 1):
        workload = Workload(
            streams=1,
            num_requests=40,
            prompt_tokens=(64, 64),
            new_tokens=(8, 8),
            seed=100 + group,
        )
        seconds = list(engine_first_token_seconds(llm, workload))
        with serving(llm, max_queue=8) as url:
            report = run_load(url, workload)
        if group:
            engine.append(statistics.median(seconds) * 1e3)
            server.append(report["milliseconds"]["ttft"]["p50"])
    medians = statistics.median(engine), statistics.median(server)
    note(f"first token: engine {medians[0]:.2f} ms, server {medians[1]:.2f} ms")
    return {
        "ttft_ms": {"engine": round(medians[0], 2), "server": round(medians[1], 2)},
        "ttft_overhead_ms": round(medians[1] - medians[0], 2),
    }


def open_loop(llm, options, lengths, rate):
    """Latencies at a part of the rate at saturation, after a warm-up at the same rate."""
    with serving(llm, max_queue=4 * options.requests) as url:
        for seconds, seed in ((options.warmup_seconds, 1), (options.load_seconds, 2)):
            workload = Workload(
                rate=round(LOAD * rate, 3),
                duration=seconds,
                prompt_tokens=lengths[0],
                new_tokens=lengths[1],
                seed=seed,
            )
            plot = ["--plot", options.plot] if options.plot and seed == 2 else []
            report = run_load(url, workload, *plot)
            note(f"{workload.rate} requests/s: {report['milliseconds']}")
    return {"load": {"rate": workload.rate, **report["milliseconds"], "errors": report["errors"]}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(LENGTHS), default="tiny")
    parser.add_argument("--streams", type=int, default=64, help="slots of the engine")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup-seconds", type=float, default=12)
    parser.add_argument("--load-seconds", type=float, default=30)
    parser.add_argument("--plot", help="a PNG of the run at 70%% load")
    parser.add_argument("--open-loop", action="store_true", help="with tiny, too")
    parser.add_argument("keys", nargs="*", help="key=value settings of the model")
    options = parser.parse_args()
    keys = dict(key.split("=", 1) for key in options.keys)
    lengths = LENGTHS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        llm = load_model(options.model, options.streams, Path(folder), keys)
        note("loaded")
        if options.model == "tiny":
            warm_up(llm, options, lengths)
        else:
            llm.warm_up()
        tune_interpreter()
        note("compiled")
        result, rate = compare(llm, options, lengths)
        if options.model == "tiny":
            result |= first_token_overhead(llm, options, lengths)
        if options.model != "tiny" or options.open_loop:
            result |= open_loop(llm, options, lengths, rate)
    load = [round(value, 1) for value in os.getloadavg()]
    result |= {"model": options.model, "streams": options.streams, "system_load": load}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
