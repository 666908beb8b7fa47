"""Metrics of the server for Prometheus, with vLLM's names, so that its dashboards and autoscalers
fit with the prefix `vllm`.
"""

from collections.abc import Iterator
from typing import Any

from maxtext.common.extras import require
from maxtext.inference.async_engine import AsyncEngine
from maxtext.inference.requests import Completion
from maxtext.inference.server.errors import FINISH_REASONS

FEATURE = "maxtext serve"
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(
    float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5)
)  # 1, 2, 5, 10 … 500000
FINISHED_REASONS = (*dict.fromkeys(FINISH_REASONS.values()), "abort", "error")  # labels
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Between tokens; the mean over those of a step.", SECONDS),
    "request_time_per_output_token_seconds": ("Decode time a token, by choice.", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token, by choice.", SECONDS),
    "request_queue_time_seconds": ("From arrival to a slot of the engine.", SECONDS),
    "request_prefill_time_seconds": ("From the slot to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of a completion.", TOKENS),
    "request_params_n": ("Choices of a request.", TOKENS),
    "iteration_tokens_total": ("Tokens that a step prefills and generates.", TOKENS),
}


class ServerMetrics:
    """Counters and histograms of requests, and the state of the engine at each scrape."""

    def __init__(self, engine: AsyncEngine, model_name: str, prefix: str = "maxtext"):
        client = require("prometheus_client", FEATURE)
        self.core = require("prometheus_client.core", FEATURE)
        self.exposition = require("prometheus_client.exposition", FEATURE)
        self.engine = engine
        self.model_name = model_name
        self.prefix = prefix
        self.registry = client.CollectorRegistry()  # not the global one, which has more metrics
        labels = ["model_name"]

        def counter(name: str, text: str, *names: str) -> Any:
            full_name = f"{prefix}:{name}"
            return client.Counter(full_name, text, [*labels, *names], registry=self.registry)

        self.histograms = {
            name: client.Histogram(
                f"{prefix}:{name}", text, labels, registry=self.registry, buckets=buckets
            ).labels(model_name)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(model_name)
        self.success = counter("request_success", "Finished choices.", "finished_reason")
        for reason in FINISHED_REASONS:
            self.success.labels(model_name, reason)
        self.http_requests = counter("http_requests", "HTTP requests.", "path", "status")
        self.rejected = counter("requests_rejected", "Requests that were refused.", "reason")
        self.registry.register(self)
        engine.on_step = self.histograms["iteration_tokens_total"].observe

    def collect(self) -> Iterator[Any]:
        """The state of the engine, as prometheus_client asks for it at each scrape."""
        stats = self.engine.stats
        num_blocks = stats.num_blocks
        # Also those that the engine has not seen yet, since it is in a step.
        num_waiting = max(self.engine.num_open - stats.num_running, stats.num_waiting)
        gauges = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": num_waiting,
            "kv_cache_usage_perc": stats.num_blocks_in_use / num_blocks if num_blocks else 0.0,
            "kv_pages_total": num_blocks,
            "kv_pages_in_use": stats.num_blocks_in_use,
            "kv_pages_cached": stats.num_blocks_cached,
            "compiled_programs": self.engine.engine.programs.num_compiled,
        }
        counters = {
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "num_preemptions": stats.num_preemptions,
            "spec_decode_num_drafts": stats.num_drafts,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        }
        for values, family in (
            (gauges, self.core.GaugeMetricFamily),
            (counters, self.core.CounterMetricFamily),
        ):
            for name, value in values.items():
                metric = family(
                    f"{self.prefix}:{name}", "State of the engine.", labels=["model_name"]
                )
                metric.add_metric([self.model_name], value)
                yield metric
        for name, labels in (
            ("cache_config_info", self.cache_settings()),
            ("lora_requests_info", self.adapter_state()),
        ):
            metric = self.core.GaugeMetricFamily(
                f"{self.prefix}:{name}", "Settings and state.", labels=["model_name", *labels]
            )
            metric.add_metric([self.model_name, *labels.values()], 1)
            yield metric

    def cache_settings(self) -> dict[str, str]:
        engine = self.engine.engine
        return {
            "block_size": str(engine.batches.block_size),
            "num_gpu_blocks": str(self.engine.stats.num_blocks),
            "max_num_seqs": str(engine.cache_config.slots),
            "max_model_len": str(engine.max_length),
            "enable_prefix_caching": str(engine.prefix_cache.enabled),
        }

    def adapter_state(self) -> dict[str, str]:
        stats = self.engine.stats
        return {
            "max_lora": str(self.engine.llm.adapters.slots),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }

    def render(self) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        return self.exposition.generate_latest(self.registry), "text/plain; version=0.0.4"

    def start(self, num_prompt_tokens: int, seconds: float) -> None:
        """The first token of a prompt came after `seconds`."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def add_tokens(self, count: int, seconds: float) -> None:
        """A choice got `count` tokens, `seconds` after those before."""
        self.histograms["inter_token_latency_seconds"].observe(seconds / count)

    def finish(self, completion: Completion, submitted_at: float) -> None:
        self.count_finished(FINISH_REASONS.get(completion.finish_reason, "error"), 1)
        num_tokens = len(completion.token_ids)
        self.histograms["request_generation_tokens"].observe(num_tokens)
        if (times := completion.times) is None:
            return
        decode_seconds = times.finished_at - times.first_token_at
        seconds = {
            "e2e_request_latency_seconds": times.finished_at - submitted_at,
            "request_queue_time_seconds": times.started_at - submitted_at,
        }
        if num_tokens:
            seconds["request_prefill_time_seconds"] = times.first_token_at - times.started_at
            seconds["request_decode_time_seconds"] = decode_seconds
        if num_tokens > 1:
            per_token = decode_seconds / (num_tokens - 1)
            seconds["request_time_per_output_token_seconds"] = per_token
        for name, value in seconds.items():
            self.histograms[name].observe(max(value, 0.0))

    def count_finished(self, reason: str, count: int) -> None:
        self.success.labels(self.model_name, reason).inc(count)

    def count_choices(self, count: int) -> None:
        self.histograms["request_params_n"].observe(count)

    def count_rejected(self, reason: str) -> None:
        self.rejected.labels(self.model_name, reason).inc()

    def count_http(self, path: str, status: int) -> None:
        self.http_requests.labels(self.model_name, path, str(status)).inc()
