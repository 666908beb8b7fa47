"""Adapters that the server has loaded are models by their names."""

import httpx
import pytest

from maxtext import LLM
from tests.inference.server.local_server import run_server

pytest.importorskip("peft")
from tests.support.served_adapters import KINDS, SETTINGS, adapted, greedy

PROMPT = [0, 5, 12]


@pytest.mark.slow
def test_each_adapter_is_a_model(folder, model, tmp_path, few_programs):
    """The base and an adapter give the tokens of PEFT's models, in one server."""
    wrapped = adapted(model, KINDS["plain"], seed=1)
    wrapped.save_pretrained(tmp_path / "plain")
    llm = LLM.load(folder, lora_input_adapters_path=str(tmp_path), **SETTINGS)
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with run_server(llm) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["tiny", "alias", "plain"]
        for name, reference in (("tiny", model), ("plain", wrapped)):
            ask = {**body, "model": name, "return_token_ids": True}
            result = client.post("/v1/completions", json=ask).json()
            expected = greedy(reference, [PROMPT])[0].tolist()
            assert (result["model"], result["choices"][0]["token_ids"]) == (name, expected)
