"""Latencies and rates of a load test, as numbers and as text.

Of a request with N tokens whose events came at t_1 ... t_k and which was sent at t_0:

    TTFT        t_1 - t_0, time to the first token
    TPOT        (t_k - t_1) / (N - 1), time per output token after the first
    gap         t_(i+1) - t_i, between two events; an event may have several tokens
    end to end  the time of the whole response

Percentiles are interpolated linearly. Failed requests count in `errors` and nowhere else, except
that their tokens are not part of any rate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from maxtext.common.types import Json
from maxtext.diagnostics.load.client import RequestRecord
from maxtext.diagnostics.load.generator import LoadResult, Workload

PERCENTILES = (50, 90, 99)
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "gap": "gap between events",
    "end_to_end": "end to end",
}


def successful(result: LoadResult) -> list[RequestRecord]:
    return [record for record in result.records if not record.error]


def latencies(records: Sequence[RequestRecord]) -> dict[str, np.ndarray]:
    """Seconds, by the names of TITLES."""
    with_text = [record for record in records if record.event_times]
    several = [record for record in with_text if record.completion_tokens > 1]
    gaps = [np.diff(record.event_times) for record in with_text]
    return {
        "ttft": np.array([record.first_token_seconds for record in with_text]),
        "tpot": np.array([time_per_output_token(record) for record in several]),
        "gap": np.concatenate(gaps) if gaps else np.zeros(0),
        "end_to_end": np.array([record.seconds for record in records]),
    }


def time_per_output_token(record: RequestRecord) -> float:
    return (record.event_times[-1] - record.event_times[0]) / (record.completion_tokens - 1)


def summarize(result: LoadResult, workload: Workload) -> Json:
    """The report of a run, as JSON."""
    records = successful(result)
    seconds = max(result.seconds, 1e-9)
    new_tokens = sum(record.completion_tokens for record in records)
    failed = [record for record in result.records if record.error]
    return {
        "workload": {**asdict(workload), "rate": workload.rate and str(workload.rate)},
        "requests": len(records),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(records) / seconds, 3),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "new_tokens": new_tokens,
        "tokens_per_second": round(new_tokens / seconds, 2),
        "errors": dict(Counter(record.error for record in failed)),
        "first_error": failed[0].message[:300] if failed else None,
        "milliseconds": {
            name: milliseconds(values) for name, values in latencies(records).items() if len(values)
        },
    }


def milliseconds(values: np.ndarray) -> dict[str, float]:
    numbers = {f"p{each}": np.percentile(values, each) for each in PERCENTILES}
    numbers |= {"mean": values.mean(), "max": values.max()}
    return {name: round(float(value) * 1e3, 3) for name, value in numbers.items()}


def table(summary: Json) -> list[list[str]]:
    """Rows of cells: a latency each, in milliseconds."""
    columns = [*(f"p{each}" for each in PERCENTILES), "mean", "max"]
    rows = [["milliseconds", *columns]]
    for name, title in TITLES.items():
        numbers = summary["milliseconds"].get(name)
        cells = [f"{numbers[column]:,.2f}" for column in columns] if numbers else ["-"] * 5
        rows.append([title, *cells])
    return rows


def sentences(summary: Json) -> list[str]:
    """Rates and errors, a line each."""
    lines = [
        f"{summary['requests']:,} requests in {summary['seconds']:,.1f} s: "
        f"{summary['requests_per_second']:,.2f} requests/s, "
        f"{summary['tokens_per_second']:,.1f} new tokens/s",
    ]
    if summary["errors"]:
        counts = ", ".join(f"{count} x {error}" for error, count in summary["errors"].items())
        lines.append(f"errors: {counts} (the first: {summary['first_error']})")
    else:
        lines.append("errors: none")
    return lines
