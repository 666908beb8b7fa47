"""`maxtext chat`: a conversation with a model in the terminal.

In a pipe, each line of standard input is a message or a command, and standard output is what the model answers.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from maxtext.cli.answering import Answering, note, open_model, refuse, settle, styled, write
from maxtext.common.errors import ConfigError, UserError

if TYPE_CHECKING:
    from maxtext.inference import Answer

MARK = "> "
BOLD_MARK = "\x01\x1b[1m\x02> \x01\x1b[0m\x02"  # \x01 and \x02: what readline must not count as width
HELP = """\
/reset         forget the conversation
/system TEXT   what the model is told about its part, from now on; without TEXT nothing
/help          this list
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two: //."""
USELESS = {
    "prompt": "type it",
    "load_parameters_path": "the path after `chat` names the model",
    "multi_sampling": "a conversation has one answer to a message",
    "enable_model_warmup": "the first message warms it up",
    "return_log_prob": "use `maxtext decode` or `maxtext batch`",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}


def run(words: list[str]) -> int:
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise ConfigError("which model? maxtext chat DIR [key=value ...]")
    config = settle(words[0], None, words[1:])
    refuse(config, "chat", USELESS)
    model = open_model(words[0], config)
    person = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(model)
    if person:
        note(f"{words[0]}, loaded in {model.loading_seconds:.1f} s; /help lists the commands")
    read = reader(person)
    while (line := read()) is not None:
        if not line.strip():
            continue
        if line.startswith("/") and not line.startswith("//"):
            if not command(conversation, line):
                break
        else:
            answer(conversation, line.removeprefix("/") if line.startswith("//") else line, person)
    return 0


def reader(person: bool) -> Callable[[], str | None]:
    """A function that gives the next line, None at the end of the input."""
    if not person:
        return lambda: line.rstrip("\r\n") if (line := sys.stdin.readline()) else None
    try:
        import readline  # noqa: F401  (gives input() its editing and history)
    except ImportError:
        mark = MARK
    else:
        mark = BOLD_MARK if styled(sys.stdout) else MARK

    def read() -> str | None:
        while True:
            try:
                return input(mark)
            except EOFError:
                write("\n")
                return None
            except KeyboardInterrupt:
                write("\n")
                note("Ctrl-D or /exit leaves")

    return read


def command(conversation: "Conversation", line: str) -> bool:
    """Obey a line that begins with a slash; returns whether the conversation goes on."""
    name, _, rest = line.strip().partition(" ")
    if name == "/exit":
        return False
    if name == "/help":
        note(HELP)
    elif name == "/reset":
        conversation.turns.clear()
        note("the conversation begins anew")
    elif name == "/system":
        conversation.system = rest.strip()
        note("the model is told so from now on" if conversation.system else "the model is told nothing about its part")
    else:
        note(f"there is no command {name}; /help lists them, and // begins a message with a slash")
    return True


def answer(conversation: "Conversation", text: str, person: bool) -> None:
    """Show what the model says to a message. What goes wrong is said, and the conversation goes on without it."""
    conversation.turns.append({"role": "user", "content": text})
    began, said, whole = time.perf_counter(), "", None  # `whole`: the answer, if it came to its end
    try:
        with interruptible() as interrupted:
            pieces = conversation.pieces()
            for piece, found in pieces:
                write(piece)
                said, whole = said + piece, found
                if interrupted():
                    pieces.close()  # the model stops, too
                    break
    except UserError as error:
        conversation.turns.pop()
        note(str(error))
        return
    write("\n" if whole else " … (stopped)\n")
    if not said:
        conversation.turns.pop()
        return
    conversation.turns.append({"role": "assistant", "content": said})
    if whole and whole.finished == "length":
        note(f"there was no more room: max_target_length={conversation.model.config.max_target_length}")
    if whole and person:
        count, seconds = len(whole.ids), time.perf_counter() - began
        note(f"{count:,} tokens, {count / max(seconds, 1e-9):,.1f} tokens/s")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, for the engine must not be torn out of its work; a second one ends the program as usual."""
    pressed: list[int] = []

    def note_it(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """What was said, as much of it as there is room for."""

    def __init__(self, model: Answering):
        from maxtext.inference.sampling import Sampling

        self.model, self.sampling = model, Sampling.of(model.config)
        self.system = ""
        self.turns: list[Mapping[str, Any]] = []
        self.told = False  # that early turns are dropped
        self.answers = 0
        _ = model.template  # a model that cannot chat is refused before anything is typed

    def pieces(self) -> Generator[tuple[str, "Answer | None"]]:
        """The answer to the last turn, as it comes."""
        from maxtext.inference import Ask

        ids = self.fitted()
        seed = self.model.config.init_weights_seed + self.answers
        self.answers += 1
        return self.model.spoken(Ask(ids, self.model.room(ids), self.sampling, seed=seed))

    def fitted(self) -> list[int]:
        """The ids of the conversation, without its oldest turns where it has become too long."""
        whole = self.model.config.max_target_length
        most = self.model.reserved or whole - whole // 4  # of the room a quarter stays for the answer
        turns = list(self.turns)
        while len(ids := self.ids(turns)) > most and len(turns) > 1:
            del turns[:2]
        self.model.room(ids)  # a message that is too long by itself is refused, and costs no turn
        if len(turns) < len(self.turns) and not self.told:
            self.told = True
            note(f"the conversation is longer than max_target_length={whole} allows: its oldest turns are dropped")
        self.turns = turns
        return ids

    def ids(self, turns: list[Mapping[str, Any]]) -> list[int]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        return self.model.conversation([*told, *turns])
