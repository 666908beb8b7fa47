"""The time between tokens of running streams while a long prompt is prefilled.

    python benchmarks/long_prompt.py [--prompt 100000] [--streams 4] [--cold] [key=value ...]

A tiny model with random weights in float32 serves `streams` requests, read as a
server does. After some seconds, a prompt of `prompt` tokens and then one of 32 tokens arrive. A
first run compiles the programs. Prints one JSON line: milliseconds between the deltas of a stream
before and during the prefill, and the seconds to the first tokens of both prompts.
`use_chunked_prefill=false` prefills the prompt by one program, which takes memory for the square of
its length.
"""

import argparse
import json
import os
import threading
import time

import numpy as np
from decode import load

from maxtext.inference import AsyncEngine, GenerationRequest, SamplingParams

BEFORE_SECONDS = 5.0


def request(length, count, seed=0):
    ids = np.random.default_rng(seed).integers(0, 500, length).tolist()
    return GenerationRequest(ids, SamplingParams(max_new_tokens=count, ignore_eos=True))


def read(stream, times):
    for delta in stream:
        if delta.token_ids:
            times.append(time.monotonic())


def run(llm, options):
    """The times of the deltas of each stream, and of the arrival and the first tokens of the long
    and the short prompt."""
    engine = AsyncEngine(llm)
    streams = [
        engine.submit(request(32, options.new_tokens, seed)) for seed in range(options.streams)
    ]
    deltas = [[] for _ in streams]
    threads = [
        threading.Thread(target=read, args=pair) for pair in zip(streams, deltas, strict=True)
    ]
    for thread in threads:
        thread.start()
    while not all(deltas):  # the first programs are compiled
        time.sleep(0.1)
    time.sleep(BEFORE_SECONDS)
    arrival = time.monotonic()
    first = {"long": [], "short": []}
    others = []
    for name, length in (("long", options.prompt), ("short", 32)):
        stream = engine.submit(request(length, 1, seed=100))
        others.append(threading.Thread(target=read, args=(stream, first[name])))
        others[-1].start()
        time.sleep(0.5)
    for thread in others:
        thread.join()
    for stream in streams:
        stream.cancel()
    for thread in threads:
        thread.join()
    engine.close()
    return deltas, arrival, first["long"][0], first["short"][0]


def gaps(deltas, start, end):
    """Percentiles of the milliseconds between deltas of a stream, from `start` to `end`."""
    between = [
        1e3 * (min(after, end) - max(before, start))
        for times in deltas
        for before, after in zip(times, [*times[1:], end], strict=True)
        if after > start and before < end
    ]
    if not between:
        return {"deltas": 0}
    return {
        "deltas": len(between),
        "p50": round(float(np.percentile(between, 50)), 1),
        "p99": round(float(np.percentile(between, 99)), 1),
        "max": round(max(between), 1),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=20_000)
    parser.add_argument("--cold", action="store_true", help="count the time of the compiler, too")
    parser.add_argument("keys", nargs="*", help="key=value settings of the model")
    options = parser.parse_args()
    keys = dict(key.split("=", 1) for key in options.keys)
    length = max(options.prompt, options.new_tokens + 32) + 1
    sizes = {"dtype": "float32", "weight_dtype": "float32", "max_target_length": length}
    sizes |= {"base_num_decoder_layers": 1, "base_num_query_heads": 1, "head_dim": 32}
    llm = load("tiny", per_device_batch_size=options.streams + 2, **(sizes | keys))
    if not options.cold:
        run(llm, options)  # compiles
    deltas, arrival, long_first, short_first = run(llm, options)
    result = {
        "prompt": options.prompt,
        "chunked": llm.engine.scheduler.chunk_size is not None,
        "ms_between_deltas_before": gaps(deltas, arrival - BEFORE_SECONDS + 1, arrival),
        "ms_between_deltas_during": gaps(deltas, arrival, long_first),
        "seconds_to_first_token": {
            "long": round(long_first - arrival, 2),
            "short": round(short_first - arrival - 0.5, 2),
        },
        "system_load": [round(value, 1) for value in os.getloadavg()],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
