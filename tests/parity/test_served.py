"""Completions of the server, whole and streamed, are those of `LLM.generate` and of transformers,
for families with each kind of cache: full attention, sliding windows, experts, recurrent states and
latent attention.
"""

import json
import shutil

import httpx
import pytest
import zoo

from maxtext import LLM
from tests.inference import few_shapes
from tests.inference.conftest import write_tokenizer
from tests.inference.server.local_server import run_server

WORDS = ["<s>", "</s>", "<unk>", *(f"w{token}" for token in range(3, zoo.VOCABULARY))]
NEW_TOKENS = 10
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NEW_TOKENS}
CHAT = {"messages": [{"role": "user", "content": "w5 w12 w31"}]}
CHAT_IDS = [5, 12, 31, 9]  # by the template of `run_server`
FAMILIES = [
    "llama",
    "qwen3",
    "gemma3 stretched",
    "qwen3 experts sliding",
    "mixtral sliding",
    "qwen3-next one to one",
    "deepseek3",
]


def stream(client, path, body):
    """(token ids, text) of the choices of a stream, by index."""
    blocks = client.post(path, json={**body, "stream": True}).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    choices: dict[int, tuple[list[int], str]] = {}
    for block in blocks[:-2]:
        for part in json.loads(block.removeprefix("data: "))["choices"]:
            ids, text = choices.get(part["index"], ([], ""))
            text += part["text"] if "text" in part else part["delta"].get("content", "")
            choices[part["index"]] = [*ids, *part.get("token_ids", ())], text
    return [choices[index] for index in sorted(choices)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_server_equals_generate_and_transformers(name, specimen, tmp_path, monkeypatch):
    few_shapes.patch(monkeypatch)
    example = specimen(name)
    folder = tmp_path / "model"
    shutil.copytree(example.folder, folder)
    write_tokenizer(folder, WORDS)
    hf_model = zoo.hf_model(folder)
    prompts = [example.ids[0][:23].tolist(), example.ids[1][:9].tolist()]
    expected = [zoo.continued(hf_model, prompt, NEW_TOKENS) for prompt in (*prompts, CHAT_IDS)]
    llm = LLM.load(folder, **zoo.SETTINGS)
    generated = llm.generate([*prompts, CHAT_IDS], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert generated == expected
    with (
        run_server(llm, slots=4, length=zoo.LENGTH) as (_, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for path, ask, tokens in (
            ("/v1/completions", {"prompt": prompts}, expected[:2]),
            ("/v1/chat/completions", CHAT, expected[2:]),
        ):
            body = {**ask, **GREEDY, "return_token_ids": True}
            choices = client.post(path, json=body).json()["choices"]
            assert [choice["token_ids"] for choice in choices] == tokens
            texts = [
                choice["text"] if "text" in choice else choice["message"]["content"]
                for choice in choices
            ]
            visible = [[WORDS[token] for token in row if token > 1] for row in tokens]
            assert [text.split() for text in texts] == visible
            assert stream(client, path, body) == list(zip(tokens, texts, strict=True))
