"""The server under load."""

import asyncio

import pytest

from maxtext.diagnostics.load.client import Target
from maxtext.diagnostics.load.generator import LoadGenerator, Workload
from maxtext.diagnostics.load.report import summarize
from tests.inference.server.local_server import KEY
from tests.support.server_client import metric, wait_until_idle


@pytest.mark.slow
def test_load_generator_counts_what_the_server_counts(server, http):
    workload = Workload(streams=6, num_requests=20, prompt_tokens=(3, 30), new_tokens=(1, 40))
    names = ("generation_tokens_total", "prompt_tokens_total")
    before = [metric(http, name) for name in names]
    generator = LoadGenerator(Target.from_url(server[1], KEY), workload)
    result = asyncio.run(generator.run())
    wait_until_idle(http)
    summary = summarize(result, workload)
    assert (summary["requests"], summary["errors"]) == (20, {})
    assert all(each.completion_tokens == each.new_tokens for each in result.records)
    after = [metric(http, name) for name in names]
    counts = [int(end - start) for start, end in zip(before, after, strict=True)]
    assert counts == [summary["new_tokens"], summary["prompt_tokens"]]
    assert set(summary["milliseconds"]) == {"ttft", "tpot", "gap", "end_to_end"}
