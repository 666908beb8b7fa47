"""The client of `maxtext chat --server` with the real server."""

import io

import pytest

from maxtext.cli.main import main
from tests.inference.server.local_server import KEY
from tests.support.server_client import greedy, text_of


@pytest.mark.slow
def test_terminal_chat_equals_transformers(server, model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w12\n"))
    args = ["--api-key", KEY, "--model", "alias", "temperature=0", "max_tokens=12"]
    assert main(["chat", "--server", server[1], *args]) == 0
    new, _ = greedy(model, [5, 12, 9], 12)
    assert capsys.readouterr().out.split() == text_of(new).split()
