"""Sends requests to a server, in a closed or an open loop, and records what comes back.

Closed loop: a number of streams, each of which sends its next request when the last has ended. Open
loop: requests arrive at a rate, at random and whatever the server does, as those of many users do
(a Poisson process). Prompts are random token ids, so that no prefix of one is in another.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.diagnostics.load.client import Client, RequestRecord, Target

# Its token ids are those that prompts are made of.
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog, while seven wizards box with five dozen liquor "
    "jugs; 1234567890 pages (or more) of plain text follow. How vexingly quick daft zebras jump!"
)
PATH = "/v1/completions"
MAX_ENCODED = 4096  # requests before the first is sent
TICK_SECONDS = 1.0  # between calls of `on_tick`


@dataclass(frozen=True)
class Workload:
    """`streams` or `rate` is set, and `num_requests` or `duration`. With a duration, no request is
    sent after that time; those that are under way end.
    """

    streams: int | None = None
    rate: float | None = None  # arrivals a second; infinite: all at once
    num_requests: int | None = None
    duration: float | None = None  # seconds
    prompt_tokens: tuple[int, int] = (128, 128)  # fewest and most
    new_tokens: tuple[int, int] = (64, 64)
    seed: int = 0


@dataclass(frozen=True)
class ServerInfo:
    """Facts that a server states about itself. `token_ids` may be in prompts."""

    model: str
    max_length: int | None
    token_ids: tuple[int, ...]


@dataclass
class LoadResult:
    """Requests in the order in which they were sent. The run began at `started_at` and ended with
    the last response.
    """

    records: list[RequestRecord] = field(default_factory=list)
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def seconds(self) -> float:
        return self.finished_at - self.started_at


async def read_server_info(client: Client, model: str | None = None) -> ServerInfo:
    """Raises ConfigError if the server does not answer as one of OpenAI's API does."""
    answer = await client.get("/v1/models")
    address = f"{client.target.host}:{client.target.port}"
    if answer.error == "401":
        raise ConfigError(
            f"the server at {address} needs another API key: --api-key KEY, or MAXTEXT_API_KEY"
        )
    if answer.status == 0:
        raise ConfigError(f"{address} cannot be reached: {answer.message or answer.error}")
    if answer.error:
        raise ConfigError(f"GET /v1/models of {address} failed: {answer.message or answer.error}")
    try:
        cards = {card["id"]: card for card in json.loads(bytes(answer.body))["data"]}
        name = next(iter(cards)) if model is None else model
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"GET /v1/models of {address} returned no list of models") from error
    if name not in cards:
        raise ConfigError(f"the server has no model {name!r}, but {', '.join(cards)}")
    body = {"model": name, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
    answer = await client.post("/tokenize", body, RequestRecord(0, 0))
    try:
        token_ids = sorted({int(token) for token in json.loads(bytes(answer.body))["tokens"]})
    except (ValueError, KeyError, TypeError):
        token_ids = []
    # Servers without /tokenize: ids that are plain text in common vocabularies.
    return ServerInfo(name, cards[name].get("max_model_len"), tuple(token_ids or range(400, 4000)))


def request_bodies(workload: Workload, server: ServerInfo) -> Iterator[Json]:
    """Without end. The seed determines all of them; lengths do not depend on the server."""
    random_lengths = random.Random(workload.seed)
    random_tokens = random.Random(workload.seed + 1)
    while True:
        prompt_tokens = random_lengths.randint(*workload.prompt_tokens)
        new_tokens = random_lengths.randint(*workload.new_tokens)
        yield {
            "model": server.model,
            "prompt": random_tokens.choices(server.token_ids, k=prompt_tokens),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds of the arrivals of a Poisson process: gaps are exponentially distributed."""
    generator = random.Random(seed)
    now = 0.0
    while True:
        yield now
        now += 0.0 if math.isinf(rate) else generator.expovariate(rate)


class LoadGenerator:
    """Runs a workload. `on_tick` is called about once a second with what is recorded so far."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        timeout: float = 600.0,
        model: str | None = None,
        on_tick: Callable[[LoadResult], None] | None = None,
    ):
        self.client = Client(target, timeout)
        self.workload = workload
        self.model = model
        self.on_tick = on_tick
        self.result = LoadResult()

    async def run(self) -> LoadResult:
        """Raises ConfigError if the server cannot be used; errors of requests are in records."""
        server = await read_server_info(self.client, self.model)
        self.check_length(server)
        self.prepare(server)
        self.result.started_at = time.perf_counter()
        ticker = asyncio.create_task(self.tick())
        try:
            if self.workload.rate is not None:
                await self.open_loop(self.workload.rate)
            else:
                await self.closed_loop(self.workload.streams or 1)
        finally:
            ticker.cancel()
            self.client.close()
        records = self.result.records
        self.result.finished_at = max(
            (record.finished_at for record in records), default=time.perf_counter()
        )
        return self.result

    def prepare(self, server: ServerInfo) -> None:
        """Encode the first requests, so that those that arrive together are sent together."""
        encoded = (
            (self.client.target.encode("POST", PATH, body), len(body["prompt"]), body["max_tokens"])
            for body in request_bodies(self.workload, server)
        )
        count = min(self.workload.num_requests or 0, MAX_ENCODED)
        self.encoded = itertools.chain(list(itertools.islice(encoded, count)), encoded)

    def check_length(self, server: ServerInfo) -> None:
        longest = self.workload.prompt_tokens[1] + self.workload.new_tokens[1]
        if server.max_length is not None and longest > server.max_length:
            raise ConfigError(
                f"prompts and completions of up to {longest} tokens exceed the {server.max_length} "
                f"of {server.model}: lower --prompt-tokens or --new-tokens"
            )

    async def closed_loop(self, streams: int) -> None:
        async def run_stream() -> None:
            while self.is_open():
                await self.send_next()

        await asyncio.gather(*(run_stream() for _ in range(streams)))

    async def open_loop(self, rate: float) -> None:
        tasks = set()
        for arrival in arrival_times(rate, self.workload.seed):
            delay = self.result.started_at + arrival - time.perf_counter()
            if self.workload.duration is not None and arrival >= self.workload.duration:
                break
            if delay > 0:
                await asyncio.sleep(delay)
            if not self.is_open():
                break
            tasks.add(asyncio.create_task(self.send_next()))
        await asyncio.gather(*tasks)

    def is_open(self) -> bool:
        """Whether another request is to be sent."""
        if self.workload.num_requests is not None:
            return len(self.result.records) < self.workload.num_requests
        assert self.workload.duration is not None
        return time.perf_counter() < self.result.started_at + self.workload.duration

    def send_next(self) -> Coroutine[object, None, RequestRecord]:
        """Send the next request, which counts from now on, though the task may start later."""
        data, prompt_tokens, new_tokens = next(self.encoded)
        record = RequestRecord(prompt_tokens, new_tokens)
        self.result.records.append(record)
        return self.client.send(data, record)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.on_tick is not None:
                self.on_tick(self.result)
