"""`maxtext chat --server URL`, with scripted replies of a server."""

import io
import signal
import socket

import pytest

from maxtext.cli.main import main
from tests.cli.terminal_child import run_in_terminal
from tests.inference.server.stub_api import Reply, StubResponse, run_stub


@pytest.fixture
def server():
    with run_stub(models=("one", "two")) as server:
        yield server


@pytest.fixture
def chat(server, monkeypatch, capsys):
    def run(lines, *args):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", "--server", server[1], *args])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def contents(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_replies_commands_and_history(chat, server):
    stub = server[0]
    stub.replies = [Reply("First.", reasoning="Hm."), Reply("Second ü."), Reply("Third.")]
    code, out, err = chat(["/system be brief", "a", "//b", "/reset", "/system", "c", "/exit", "d"])
    assert (code, out) == (0, "First.\nSecond ü.\nThird.\n")
    assert "the conversation is cleared" in err
    assert [contents(body) for body in stub.bodies] == [
        [("system", "be brief"), ("user", "a")],
        [("system", "be brief"), ("user", "a"), ("assistant", "First."), ("user", "/b")],
        [("user", "c")],
    ]
    assert all(body["model"] == "one" and body["stream"] for body in stub.bodies)


def test_model_key_and_fields(chat, server, monkeypatch):
    stub = server[0]
    stub.key = "sk-1"
    monkeypatch.setenv("MAXTEXT_API_KEY", "sk-1")
    code, out, _ = chat(["a"], "--model", "two", "temperature=0.5", "stop=END", "seed=3")
    assert (code, out) == (0, "Hello.\n")
    body = stub.bodies[0]
    assert body["model"] == "two"
    assert (body["temperature"], body["stop"], body["seed"]) == (0.5, "END", 3)
    assert chat(["a"], "--api-key", "sk-1", f"--server={server[1]}/v1")[0] == 2  # given twice


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--model", "three"], "has no model 'three'; it serves one, two"),
        (["messages=x"], "messages cannot be a field here"),
        (["model=x"], "--model NAME"),
        (["--api-key", "schlüssel"], "characters that a header may not have"),
        (["folder"], "unknown argument 'folder'"),
        (["--adapter", "x"], "--adapter and --server exclude each other"),
    ],
)
def test_wrong_arguments(args, reason, chat):
    code, out, err = chat(["a"], *args)
    assert (code, out) == (2, "")
    assert reason in err


def test_servers_that_cannot_be_used(chat, server, capsys):
    server[0].key = "sk-1"
    code, out, err = chat(["a"], "--api-key", "wrong")
    assert (code, out) == (2, "")
    assert "needs another API key: --api-key KEY" in err
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # without listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["chat", "--server", url]) == 2
    assert f"{url} cannot be reached: connection refused" in capsys.readouterr().err
    assert main(["chat", "--server", "ftp://host"]) == 2
    assert "--server takes an address such as http" in capsys.readouterr().err


def test_errors_are_sentences_and_the_conversation_goes_on(chat, server):
    stub = server[0]
    stub.replies = [
        Reply(status=400),
        Reply(status=429, headers={"Retry-After": "7"}),
        Reply("Half", is_cut=True),
        Reply("Part", error="the engine has failed"),
        Reply("Long", finish_reason="length"),
        Reply("Good."),
    ]
    code, out, err = chat(["a", "b", "c", "d", "e", "f"])
    assert (code, out) == (0, "Half\nPart\nLong\nGood.\n")
    assert [line for line in err.splitlines() if line] == [
        "the stub refuses",
        "the stub refuses; try again in 7 s",
        "the connection ended before the reply was complete",
        "the engine has failed",
        "the reply ends at the server's limit of tokens",
    ]
    assert contents(stub.bodies[-1]) == [("user", "e"), ("assistant", "Long"), ("user", "f")]


@pytest.mark.parametrize(
    "event",
    [[], "text", {"choices": 1}, {"choices": [1]}, {"choices": [{"delta": [2]}]}, {"usage": 3}],
)
def test_events_of_another_form_are_errors(event, chat, server, monkeypatch):
    async def stream(self, reply):
        await self.event(event)

    monkeypatch.setattr(StubResponse, "stream", stream)
    code, out, err = chat(["a"])
    assert (code, out) == (0, "")
    assert "sent an event that is n" in err
    assert "Traceback" not in err


def test_oldest_messages_are_dropped_when_the_server_has_no_room(chat, server):
    stub = server[0]
    too_long = Reply(status=400, code="context_length_exceeded")
    stub.replies = [Reply("A."), Reply("B."), too_long, too_long, Reply("C."), too_long]
    code, out, err = chat(["a", "b", "c", "/reset", "d"])
    assert (code, out) == (0, "A.\nB.\nC.\n")
    assert err.count("exceeds the server's maximum length: its oldest messages are dropped") == 1
    assert contents(stub.bodies[3]) == [("user", "b"), ("assistant", "B."), ("user", "c")]
    assert contents(stub.bodies[4]) == [("user", "c")]
    assert "the stub refuses" in err  # a message that is too long alone


CHILD = """
import fcntl, signal, sys, termios
from maxtext.cli.main import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C comes from this terminal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_interrupt_in_a_terminal_cancels_the_request(server):
    stub, url = server
    stub.replies = [
        Reply("word ", reasoning="Let me think.", seconds=0.05, part=5, is_endless=True),
        Reply("Done."),
    ]
    with run_in_terminal(CHILD, "chat", "--server", url) as child:
        assert f"one at {url}; /help lists" in child.until(b"> ")
        child.write(b"hello\n")
        assert "Let me think.\r\n\r\nword" in child.until(b"word word")
        child.process.send_signal(signal.SIGINT)
        child.until(b"(stopped)\r\n> ")
        child.write(b"again\n")
        assert "Done.\r\n34 tokens, " in child.until(b"tokens/s\r\n> ")
        assert stub.num_cancelled == 1
        child.write(b"\x04")
        assert child.wait() == 0
