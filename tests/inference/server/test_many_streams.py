"""Many requests at a time: each is answered as if it were alone, and nothing is left behind."""

import asyncio
import json
import random
import re
import time
from pathlib import Path

import pytest

from maxtext import LLM
from maxtext.common.processes import raise_descriptor_limit
from maxtext.diagnostics.load.client import Client, RequestRecord, Target
from tests.inference import few_shapes
from tests.inference.server.local_server import run_server

jsonschema = pytest.importorskip("jsonschema")

MANY = [pytest.param(50, id="50"), pytest.param(1000, id="1000", marks=pytest.mark.exhaustive)]
SOME = [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.exhaustive)]
MAX_GROWTH = 48 * 2**20  # bytes
MAX_HEALTH_SECONDS = 10  # client and server share an interpreter, and maybe a busy machine
BYTE_MODEL = {
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 1,
    "vocab_size": 290,
    "tokenizer_path": "byte",
    "max_target_length": 1024,
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "paged",
    "pagedattn_tokens_per_page": 32,
    "pagedattn_num_pages": 256,
    "override_model_config": True,
}


@pytest.fixture(scope="module")
def paged_server(folder):
    raise_descriptor_limit()
    llm = LLM.load(
        folder,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        attention="paged",
        pagedattn_tokens_per_page=16,
        pagedattn_num_pages=32 * 8,
    )
    with pytest.MonkeyPatch.context() as patch:
        few_shapes.patch(patch)
        with run_server(llm, max_queue=1000, slots=32) as server:
            yield server


@pytest.fixture(scope="module")
def byte_server():
    with pytest.MonkeyPatch.context() as patch:
        few_shapes.patch(patch)
        llm = LLM.load("qwen3-0.6b", **BYTE_MODEL)
        with run_server(llm, max_queue=1000, slots=8, length=1024) as server:
            yield server


def read_text(record):
    """The text of a streamed response."""
    assert not record.error, (record.error, record.message)
    events = bytes(record.body).decode().split("\n\n")
    chunks = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def complete_all(url, bodies, at_once=True):
    """The texts of streamed completions, and the longest time that /health took meanwhile."""
    client = Client(Target.from_url(url), timeout=500, collect=True)
    health_seconds = [0.0]

    async def send(body):
        body = {"stream": True, "ignore_eos": True, **body}
        return await client.post("/v1/completions", body, RequestRecord(0, 0))

    async def poll_health():
        monitor = Client(Target.from_url(url))
        while True:
            record = await monitor.get("/health")
            assert record.status == 200
            health_seconds.append(record.seconds)
            await asyncio.sleep(0.2)

    poller = asyncio.create_task(poll_health())
    if at_once:
        records = await asyncio.gather(*map(send, bodies))
    else:
        records = [await send(body) for body in bodies]
    poller.cancel()
    client.close()
    return [read_text(record) for record in records], max(health_seconds)


def resident_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def wait_until_free(model):
    end = time.monotonic() + 20
    while model.engine.num_open or model.engine.stats.num_blocks_in_use:
        assert time.monotonic() < end, "requests are still running"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("count", MANY)
def test_streams_equal_single_requests(paged_server, count):
    """Prompts and lengths differ; /health answers meanwhile, and memory returns."""
    model, url = paged_server
    prompts = [f"w{3 + index} w{10 + index * 7 % 40}" for index in range(12)]
    distinct = [
        {"prompt": prompt, "temperature": 0, "max_tokens": 5 + 3 * index}
        for index, prompt in enumerate(prompts)
    ]
    expected, _ = asyncio.run(complete_all(url, distinct, at_once=False))
    bodies = [distinct[index % len(distinct)] for index in range(count)]
    used = []
    for _ in range(2):
        texts, health_seconds = asyncio.run(complete_all(url, bodies))
        assert texts == [expected[index % len(distinct)] for index in range(count)]
        wait_until_free(model)
        used.append(resident_bytes())
    assert health_seconds < MAX_HEALTH_SECONDS
    assert used[1] - used[0] < MAX_GROWTH
    stats = model.engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_in_use) == (0, 0, 0)
    assert not model.engine.streams
    assert not model.engine.session.processors


@pytest.mark.parametrize("count", SOME)
def test_seeded_requests_equal_themselves_alone(paged_server, count):
    _, url = paged_server
    bodies = [
        {
            "prompt": f"w{3 + index % 50} w{3 + index % 7}",
            "temperature": 0.7 + index % 4 / 4,
            "top_p": [1, 0.9][index % 2],
            "seed": 1000 + index,
            "max_tokens": 4 + index % 13,
        }
        for index in range(count)
    ]
    alone, _ = asyncio.run(complete_all(url, bodies, at_once=False))
    together, _ = asyncio.run(complete_all(url, bodies))
    assert together == alone
    assert len(set(alone)) > 0.9 * count


def random_schema(generator, depth=0):
    """A schema whose shortest and longest values are short."""
    kinds = ["string", "integer", "boolean", "enum", "null", "pattern"]
    kind = generator.choice(kinds + (["object", "array", "anyOf", "object"] if depth < 2 else []))
    if kind == "object" or depth == 0:
        names = generator.sample(["a", "b c", "ß", 'd"e', "long_name"], generator.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(generator, depth + 1) for name in names},
            "required": names[: generator.randint(1, len(names))],
            "additionalProperties": False,
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(generator, 2) for _ in range(2)]}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(generator, 2),
            "minItems": generator.randint(0, 1),
            "maxItems": generator.randint(1, 3),
        }
    low = generator.randint(-200, 100)
    return {
        "string": {"type": "string", "maxLength": generator.randint(1, 8)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 500)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": generator.sample(["red", "Grün", 3, None, True, "x\ny"], 3)},
        "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("count", SOME)
def test_random_schemas_always_validate(byte_server, count):
    """At temperature 1, from a model with random weights."""
    _, url = byte_server
    generator = random.Random(count)
    schemas = [random_schema(generator) for _ in range(count)]
    bodies = [
        {
            "prompt": "".join(generator.choices('abc {}[]":,ß', k=generator.randint(1, 20))),
            "temperature": 1,
            "max_tokens": 900,
            "ignore_eos": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "value", "schema": schema},
            },
        }
        for schema in schemas
    ]
    texts, _ = asyncio.run(complete_all(url, bodies))
    for schema, text in zip(schemas, texts, strict=True):
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > count / 2
