"""One server for the tests of a module, and its clients."""

import httpx
import pytest

from tests.inference import few_shapes
from tests.inference.server.local_server import KEY, run_server


@pytest.fixture(scope="module")
def server(llm):
    with pytest.MonkeyPatch.context() as patch:
        few_shapes.patch(patch)
        options = {"api_keys": ["other", KEY], "cors_origins": ["http://page.test"]}
        with run_server(llm, max_body=100_000, **options) as (model, url):
            yield model, url


@pytest.fixture(scope="module")
def http(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server[1], headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key=KEY, max_retries=0, timeout=60)
