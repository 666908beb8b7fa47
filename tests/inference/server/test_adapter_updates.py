"""Adapters that are loaded and dropped while the server runs, from permitted folders only."""

import asyncio
import threading
from types import SimpleNamespace

import httpx
import pytest

from maxtext import LLM
from maxtext.inference.server.adapters import AdapterUpdates
from maxtext.inference.server.errors import ApiError
from maxtext.inference.server.protocol import UnloadAdapterRequest
from maxtext.inference.validation import RequestError
from tests.inference.server.local_server import run_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def updates(tmp_path):
    root = tmp_path / "root"
    for name in ("root/good", "root/linked_file", "root/nested/deep", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (root / "file").write_text("x")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "inner_link").symlink_to(root / "good")
    (root / "linked_file" / "adapter_model.safetensors").symlink_to(root / "file")
    return AdapterUpdates(SimpleNamespace(), root)


def test_folders_below_the_root(updates):
    assert updates.find_folder("good") == updates.root / "good"
    assert updates.find_folder("nested/deep") == updates.root / "nested" / "deep"
    absolute = str(updates.root / "good")
    assert updates.find_folder(absolute) == updates.root / "good"


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "../outside", "good/../../outside", "good/../good", "/", "/etc"),
        *("link", "link/x", "inner_link", "linked_file", "file", "missing", "good\x00", "~"),
    ],
)
def test_other_paths_are_refused_with_one_message(updates, path):
    messages = set()
    for each in (path, f"{updates.root}/../outside"):
        with pytest.raises(RequestError) as caught:
            updates.find_folder(each)
        assert caught.value.param == "lora_path"
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert str(updates.root) not in messages.pop()


def test_name_of_what_is_dropped_is_required(updates):
    with pytest.raises(RequestError, match="missing") as caught:
        asyncio.run(updates.unload(UnloadAdapterRequest()))
    assert caught.value.param == "lora_name"


def test_updates_need_permission():
    with pytest.raises(ApiError) as caught:
        AdapterUpdates(SimpleNamespace(), None).check_allowed()
    assert (caught.value.status, caught.value.kind) == (403, "permission_error")


@pytest.mark.slow
def test_adapters_come_and_go(folder, model, tmp_path, few_programs):
    """An adapter gives the tokens of PEFT's model, and requests that run meanwhile are not
    disturbed.
    """
    pytest.importorskip("peft")
    from tests.support.served_adapters import KINDS, SETTINGS, adapted, greedy

    prompt = [0, 5, 12]
    base = greedy(model, [prompt])[0].tolist()
    expected = {}
    for seed, name in enumerate(("one", "two")):
        wrapped = adapted(model, KINDS["plain"], seed=seed)
        wrapped.save_pretrained(tmp_path / name)
        expected[name] = greedy(wrapped, [prompt])[0].tolist()
        model = wrapped.unload()
    (tmp_path / "empty").mkdir()
    llm = LLM.load(folder, **SETTINGS)
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def complete(client, name, count):
        ask = {**body, "model": name, "max_tokens": count}
        response = client.post("/v1/completions", json=ask)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    with (
        run_server(llm, adapter_root=tmp_path) as (served, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        running = []
        count = len(base)
        thread = threading.Thread(target=lambda: running.append(complete(client, "tiny", 100)))
        thread.start()
        for name in ("one", "two"):
            card = client.post(LOAD, json={"lora_name": name, "lora_path": name}).json()
            assert (card["id"], card["parent"]) == (name, "tiny")
        thread.join()
        assert running[0][:count] == base
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["tiny", "alias", "one", "two"]
        for name, tokens in {"tiny": base, **expected}.items():
            assert complete(client, name, count) == tokens
        for name, path in (("one", "one"), ("tiny", "one"), ("a b", "one"), ("three", "empty")):
            refused = client.post(LOAD, json={"lora_name": name, "lora_path": path})
            assert refused.status_code == 400, refused.text
            assert str(tmp_path) not in refused.text
        assert client.post(UNLOAD, json={"lora_name": "one"}).json()["deleted"]
        assert client.post(UNLOAD, json={"lora_name": "one"}).status_code == 404
        assert client.post(UNLOAD, json={"lora_name": "tiny"}).status_code == 400
        gone = client.post("/v1/completions", json={**body, "model": "one"})
        assert gone.json()["error"]["code"] == "model_not_found"
        assert complete(client, "two", count) == expected["two"]
        assert served.engine.num_open == 0
