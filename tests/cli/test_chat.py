"""`maxtext chat` in a pipe: each line is a message or a command."""

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxtext.cli.chat import ReplyThread
from maxtext.cli.main import main
from maxtext.common.errors import UserError
from maxtext.tokenizers import ByteTokenizer
from tests.cli.fake_llm import FakeLLM
from tests.cli.terminal_child import run_in_terminal


@pytest.fixture
def loaded(loaded, monkeypatch):
    def generate_text(self, request):
        return f"reply {len(self.requests)}"[: request.params.max_new_tokens]

    monkeypatch.setattr(FakeLLM, "generate_text", generate_text)
    return loaded


@pytest.fixture
def chat(folder, loaded, monkeypatch, capsys):
    def run(lines, *args):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", str(folder), "jax_cache_dir=none", *args])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def prompt_text(llm, number=-1):
    """The prompt of a request, as text."""
    return ByteTokenizer().decode(llm.requests[number].prompt)


def chatml(*messages):
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"{text}<|im_start|>assistant\n"


def test_replies_and_history(chat, loaded):
    code, out, err = chat(["hello", "", "how are you?"])
    assert (code, out) == (0, "reply 1\nreply 2\n")
    assert "the reply ends at max_target_length" in err
    assert prompt_text(loaded[-1], 0) == chatml(("user", "hello"))
    assert prompt_text(loaded[-1]) == chatml(
        ("user", "hello"), ("assistant", "reply 1"), ("user", "how are you?")
    )
    first, second = loaded[-1].requests
    assert (first.params.seed, second.params.seed) == (0, 1)


def test_commands(chat, loaded):
    code, out, err = chat(
        [
            "/system be brief",
            "a",
            "/reset",
            "b",
            "/system",
            "/help",
            "/nonsense",
            "//c",
            "/exit",
            "never read",
        ]
    )
    assert code == 0
    assert out == "reply 1\nreply 2\nreply 3\n"
    assert prompt_text(loaded[-1], 0) == chatml(("system", "be brief"), ("user", "a"))
    assert prompt_text(loaded[-1], 1) == chatml(("system", "be brief"), ("user", "b"))
    assert prompt_text(loaded[-1], 2) == chatml(
        ("user", "b"), ("assistant", "reply 2"), ("user", "/c")
    )
    assert "/reset         clear the conversation" in err
    assert "there is no command /nonsense" in err


def test_oldest_messages_are_dropped_when_the_prompt_is_too_long(chat, loaded):
    message = "x" * 40
    code, out, err = chat([message] * 8, "max_target_length=400")
    assert code == 0
    assert out.count("reply") == 8
    assert err.count("its oldest messages are dropped") == 1
    for request in loaded[-1].requests:
        assert len(request.prompt) <= 300
        assert len(request.prompt) + request.params.max_new_tokens == 400
    # A message with its reply has 68 + 40 characters, the last one with the generation prompt 90:
    # one fits before it.
    assert prompt_text(loaded[-1]).count(message) == 2
    assert prompt_text(loaded[-1]).startswith("<|im_start|>user")


def test_message_that_is_too_long_is_refused_and_dropped(chat, loaded):
    code, out, err = chat(["y" * 200, "z"], "max_target_length=100")
    assert (code, out) == (0, "reply 1\n")
    assert "max_target_length=100 leaves none" in err
    assert prompt_text(loaded[-1]) == chatml(("user", "z"))


@pytest.mark.slow
def test_interrupted_replies_stay_and_the_conversation_goes_on(chat, loaded, monkeypatch):
    from_config = FakeLLM.from_config.__func__

    def interrupted(cls, *args, **kwargs):
        llm = from_config(cls, *args, **kwargs)
        llm.interrupt_after = 4
        return llm

    monkeypatch.setattr(FakeLLM, "from_config", classmethod(interrupted))
    code, out, _ = chat(["a", "b"])
    assert (code, out) == (0, "rep … (stopped)\nrep … (stopped)\n")
    assert prompt_text(loaded[-1]) == chatml(("user", "a"), ("assistant", "rep"), ("user", "b"))


def test_error_of_the_chat_template_is_shown(chat, loaded):
    template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('not so') }}{% endif %}"
        "{{ messages|length }}"
    )
    code, out, err = chat(["bad", "good"], f"chat_template={template}")
    assert (code, out) == (0, "reply 1\n")
    assert "refuses" in err
    assert "not so" in err
    assert prompt_text(loaded[-1]) == "1"


def test_no_chat_template(chat, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeLLM, "tokenizer_class", ByteTokenizer)
    code, out, err = chat(["a"])
    assert (code, out) == (2, "")
    assert "came without a chat template: name a file of one with chat_template_path=FILE" in err
    (tmp_path / "mine.jinja").write_text("{{ messages[-1]['content'] }}")
    code, out, _ = chat(["a"], f"chat_template_path={tmp_path / 'mine.jinja'}")
    assert (code, out) == (0, "reply 1\n")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["return_log_prob=true"], "use `maxtext decode` or `maxtext batch`"),
        (["prompt=a"], "type it"),
        (["enable_model_warmup=true"], "the first message warms it up"),
        (["decode_sampling_strategy=sharp"], "decode_sampling_strategy"),
    ],
)
def test_errors(args, expected, chat):
    code, out, err = chat(["a"], *args)
    assert (code, out) == (2, "")
    assert expected in err


def test_no_model(capsys):
    assert main(["chat"]) == 2
    assert main(["chat", "max_target_length=3"]) == 2
    assert main(["chat", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert err.count("which model? maxtext chat MODEL") == 2
    assert "'nowhere' is neither a folder nor the name of a model" in err


CHILD = """
import fcntl, signal, sys, termios
import pytest
from tests.cli import fake_llm
from maxtext.cli.main import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C comes from this terminal
# A shell that runs tests in the background ignores SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
with pytest.MonkeyPatch.context() as monkeypatch:
    fake_llm.install(monkeypatch)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_in_a_terminal(folder):
    """The prompt sign, Ctrl-C that only clears the line, a reply, its timings, Ctrl-D."""
    with run_in_terminal(CHILD, "chat", str(folder), "jax_cache_dir=none") as child:
        assert "/help lists the commands" in child.until(b"> ")
        # readline shows its prompt a moment before it reads; a Ctrl-C between the two is delayed.
        for _ in range(20):
            child.write(b"\x03")
            if child.has_output(3):
                break
        assert "Ctrl-D or /exit leaves" in child.until(b"> ")
        child.write(b"hello\n")
        seen = child.until(b"tokens/s\r\n> ")
        assert "olleh\r\n" in seen
        assert f"{len(chatml(('user', 'hello')))} tokens" in seen
        child.write(b"\x04")
        assert child.wait() == 0


@pytest.mark.slow
def test_real_model(chat_model, greedy_ids, monkeypatch, capsys):
    folder, llm = chat_model
    args = [
        "dtype=float32",
        "attention=dot_product",
        "matmul_precision=highest",
        "jax_cache_dir=none",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand then?\n"))
    assert main(["chat", str(folder), "max_target_length=64", *args]) == 0
    messages, replies = [], []
    for text in ("hi", "and then?"):
        messages.append(("user", text))
        ids = llm.tokenizer.encode_with_specials(chatml(*messages))
        if len(ids) > 48:  # three quarters of max_target_length
            messages = messages[2:]
            ids = llm.tokenizer.encode_with_specials(chatml(*messages))
        replies.append(llm.tokenizer.decode(greedy_ids(ids, 64 - len(ids))[len(ids) :]))
        messages.append(("assistant", replies[-1]))
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in replies)


def test_end_of_a_connection_after_an_interrupt_is_no_error():
    """The thread of a stopped reply reports the connection that the interrupt closed."""
    aborted = threading.Event()

    def deltas():
        aborted.wait(10)
        raise UserError("the connection ended")
        yield

    def abort():
        aborted.set()
        reply.thread.join(10)  # its error comes first

    reply = ReplyThread(deltas(), abort)
    reply.thread.start()
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(list, reply)
        time.sleep(0.02)
        reply.stop()
        assert received.result(10) == []
