"""The kernels of a trace of JAX's profiler, sorted by their share of the GPU's time.

    maxtext train ... profiler=xplane steps=20
    python benchmarks/kernel_table.py FOLDER [--top 30]

FOLDER is any folder above the trace; the newest trace is used. Digits are removed from the names of
kernels and of their HLO ops, so that the kernels of all layers are one line. Prints one line a
kernel: its total time, its share of the time of all kernels, its number of runs, its mean time.
"""

import argparse
import collections
import gzip
import json
import re
import sys
from pathlib import Path


def kernel_runs(events):
    """(name, microseconds) of each run of a kernel on a GPU."""
    processes = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name"
    }
    for event in events:
        arguments = event.get("args", {})
        on_gpu = event.get("ph") == "X" and "GPU" in processes.get(event["pid"], "")
        if on_gpu and "correlation_id" in arguments:
            name = f"{event['name'][:60]} | {arguments.get('hlo_op', '')}"
            yield re.sub(r"\d+", "", name), event["dur"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--top", type=int, default=30)
    options = parser.parse_args()
    traces = sorted(options.folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        sys.exit(f"there is no trace (*.trace.json.gz) under {options.folder}")
    times, runs = collections.Counter(), collections.Counter()
    trace = json.loads(gzip.decompress(traces[-1].read_bytes()))
    for name, duration in kernel_runs(trace["traceEvents"]):
        times[name] += duration
        runs[name] += 1
    total = sum(times.values())
    print(f"{traces[-1]}: {total / 1000:.1f} ms in {sum(runs.values())} runs of kernels")
    for name, duration in times.most_common(options.top):
        share, mean = duration / total, duration / runs[name]
        print(f"{duration / 1000:10.2f} ms {share:6.1%} {runs[name]:7} x {mean:9.1f} us  {name}")


if __name__ == "__main__":
    main()
