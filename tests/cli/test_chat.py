"""`maxtext chat` in a pipe: each line is a message or a command."""

import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext.cli.main import main
from maxtext.tokenizers import ByteTokenizer
from tests.cli.fake_llm import FakeLLM


@pytest.fixture
def made(made, monkeypatch):
    monkeypatch.setattr(
        FakeLLM, "said", lambda self, ask: f"answer {len(self.asked)}"[: ask.max_new_tokens]
    )
    return made


@pytest.fixture
def chat(folder, made, monkeypatch, capsys):
    def run(lines, *words):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", str(folder), "jax_cache_dir=none", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def heard(llm, number=-1):
    """What the model was given, as text."""
    return ByteTokenizer().decode(llm.asked[number].prompt)


def chatml(*turns):
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def test_answers_and_history(chat, made):
    code, out, err = chat(["hello", "", "how are you?"])
    assert (code, out) == (0, "answer 1\nanswer 2\n")
    assert "no more room" in err  # as this model says how it finished
    assert heard(made[-1], 0) == chatml(("user", "hello"))
    assert heard(made[-1]) == chatml(
        ("user", "hello"), ("assistant", "answer 1"), ("user", "how are you?")
    )
    first, second = made[-1].asked
    assert (first.seed, second.seed) == (0, 1)


def test_commands(chat, made):
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
            "never heard",
        ]
    )
    assert code == 0
    assert out == "answer 1\nanswer 2\nanswer 3\n"
    assert heard(made[-1], 0) == chatml(("system", "be brief"), ("user", "a"))
    assert heard(made[-1], 1) == chatml(("system", "be brief"), ("user", "b"))
    assert heard(made[-1], 2) == chatml(("user", "b"), ("assistant", "answer 2"), ("user", "/c"))
    assert "/reset         forget the conversation" in err
    assert "there is no command /nonsense" in err


def test_the_oldest_turns_go_when_there_is_no_more_room(chat, made):
    turn = "x" * 40
    code, out, err = chat([turn] * 8, "max_target_length=400")
    assert code == 0
    assert out.count("answer") == 8
    assert err.count("its oldest turns are dropped") == 1
    for ask in made[-1].asked:
        assert len(ask.prompt) <= 300
        assert len(ask.prompt) + ask.max_new_tokens == 400
    # A turn with its answer has 68 + 41 characters, the last one with the call for an answer 90:
    # one goes before it.
    assert heard(made[-1]).count(turn) == 2
    assert heard(made[-1]).startswith("<|im_start|>user")


def test_a_message_without_room_is_refused_and_forgotten(chat, made):
    code, out, err = chat(["y" * 200, "z"], "max_target_length=100")
    assert (code, out) == (0, "answer 1\n")
    assert "max_target_length=100 leaves no room" in err
    assert heard(made[-1]) == chatml(("user", "z"))


def test_interrupted_answers_stay_and_the_conversation_goes_on(chat, made, monkeypatch):
    load = FakeLLM.load.__func__

    def interrupted(cls, *args, **keys):
        llm = load(cls, *args, **keys)
        llm.interrupt_after = 4
        return llm

    monkeypatch.setattr(FakeLLM, "load", classmethod(interrupted))
    code, out, _ = chat(["a", "b"])
    assert (code, out) == (0, "ans … (stopped)\nans … (stopped)\n")
    assert heard(made[-1]) == chatml(("user", "a"), ("assistant", "ans"), ("user", "b"))


def test_a_template_that_refuses_says_so(chat, made):
    template = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('not so') }}{% endif %}{{ messages|length }}"
    code, out, err = chat(["bad", "good"], f"chat_template={template}")
    assert (code, out) == (0, "answer 1\n")
    assert "refuses" in err
    assert "not so" in err
    assert heard(made[-1]) == "1"


def test_no_chat_template(chat, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeLLM, "tokenizer_class", ByteTokenizer)
    code, out, err = chat(["a"])
    assert (code, out) == (2, "")
    assert "came without a chat template: name a file of one with chat_template_path=FILE" in err
    (tmp_path / "mine.jinja").write_text("{{ messages[-1]['content'] }}")
    code, out, _ = chat(["a"], f"chat_template_path={tmp_path / 'mine.jinja'}")
    assert (code, out) == (0, "answer 1\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["return_log_prob=true"], "use `maxtext decode` or `maxtext batch`"),
        (["prompt=a"], "type it"),
        (["enable_model_warmup=true"], "the first message warms it up"),
        (["decode_sampling_strategy=sharp"], "decode_sampling_strategy"),
    ],
)
def test_mistakes(words, expected, chat):
    code, out, err = chat(["a"], *words)
    assert (code, out) == (2, "")
    assert expected in err


def test_no_model(capsys):
    assert main(["chat"]) == 2
    assert main(["chat", "max_target_length=3"]) == 2
    assert main(["chat", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert err.count("which model? maxtext chat DIR") == 2
    assert "'nowhere' is neither a folder nor the name of a model" in err


CHILD = """
import fcntl, signal, sys, termios
import pytest
from tests.cli import fake_llm
from maxtext.cli.main import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C comes from this terminal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
with pytest.MonkeyPatch.context() as monkeypatch:
    fake_llm.install(monkeypatch)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_in_a_terminal(folder):
    """A person: a mark to type at, Ctrl-C that only clears the line, an answer, its figures,
    Ctrl-D.
    """
    terminal, other_side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "chat", str(folder), "jax_cache_dir=none"],
        stdin=other_side,
        stdout=other_side,
        stderr=other_side,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(other_side)

    def until(sign):
        seen = b""
        while sign not in seen:
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 1024)
        return seen.decode()

    try:
        assert "/help lists the commands" in until(b"> ")
        for _ in range(
            20
            # readline shows its mark a moment before it waits, and a Ctrl-C between the two waits, too
        ):
            os.write(terminal, b"\x03")
            if select.select([terminal], [], [], 3)[0]:
                break
        assert "Ctrl-D or /exit leaves" in until(b"> ")
        os.write(terminal, b"hello\n")
        seen = until(b"tokens/s\r\n> ")
        assert "olleh\r\n" in seen
        assert f"{len(chatml(('user', 'hello')))} tokens" in seen
        os.write(terminal, b"\x04")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(terminal)


@pytest.mark.slow
def test_a_real_model(talker, likeliest, monkeypatch, capsys):
    folder, llm = talker
    words = [
        "dtype=float32",
        "attention=dot_product",
        "matmul_precision=highest",
        "jax_cache_dir=none",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand then?\n"))
    assert main(["chat", str(folder), "max_target_length=64", *words]) == 0
    turns, said = [], []
    for message in ("hi", "and then?"):
        turns.append(("user", message))
        ids = llm.tokenizer.encode_with_specials(chatml(*turns))
        if len(ids) > 48:  # three quarters of the room
            turns = turns[2:]
            ids = llm.tokenizer.encode_with_specials(chatml(*turns))
        said.append(llm.tokenizer.decode(likeliest(ids, 64 - len(ids))[len(ids) :]))
        turns.append(("assistant", said[-1]))
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in said)
