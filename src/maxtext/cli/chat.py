"""`maxtext chat`: a conversation with a model in the terminal.

In a pipe, each line of standard input is a message or a command, and standard output is what the
model answers.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from maxtext.cli.answering import Answering, note, open_model, refuse, settle, styled, write
from maxtext.common import progress, signals
from maxtext.common.errors import ConfigError, UserError

if TYPE_CHECKING:
    from maxtext.inference import Answer

Pieces = Generator["tuple[str, Answer | None]"]
MARK = "> "
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 2.0
BOLD_MARK = (
    "\x01\x1b[1m\x02> \x01\x1b[0m\x02"  # \x01 and \x02: what readline must not count as width
)
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


def run(args: list[str]) -> int:
    if not args or args[0].startswith("-") or "=" in args[0]:
        raise ConfigError("which model? maxtext chat DIR [key=value ...]")
    config = settle(args[0], None, args[1:])
    refuse(config, "chat", USELESS)
    model = open_model(args[0], config)
    person = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(model)
    progress.stop()
    if person:
        note(f"{args[0]}, loaded in {model.loading_seconds:.1f} s; /help lists the commands")
    with Keyboard(person) as keyboard:
        while (line := keyboard.read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not command(conversation, line):
                    break
            else:
                answer(
                    conversation,
                    line.removeprefix("/") if line.startswith("//") else line,
                    keyboard,
                )
    return 0


class Keyboard:
    """What a person types. Ctrl-C clears the line that is typed, or stops the answer, and never
    leaves the program, which Ctrl-D and /exit do. In a pipe, an interrupt outside of an answer ends
    the program."""

    def __init__(self, person: bool):
        self.person = person
        self.reading = False
        self.waiting = False  # until the engine is free again
        self.speaking: Speaking | None = None
        self.mark = MARK
        if person:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its editing and history)

                self.mark = BOLD_MARK if styled(sys.stdout) else MARK

    def __enter__(self) -> "Keyboard":
        self.before = signal.signal(signal.SIGINT, self.on_interrupt)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        signal.signal(signal.SIGINT, self.before)
        # A thread that compiles cannot be stopped, and the interpreter must not end under it.
        if self.speaking is not None and not self.speaking.settle(SETTLE_SECONDS):
            sys.stdout.flush()
            os._exit(0 if error is None else signals.exit_code_of(error))

    def on_interrupt(self, number: int, frame: object) -> None:
        if self.speaking is not None and not self.speaking.ended:
            self.speaking.stop()
        elif self.waiting:
            self.waiting = False
        elif self.reading or not self.person:
            raise signals.Interrupted(number)

    def read(self) -> str | None:
        """The next line, None at the end of the input."""
        if not self.person:
            return line.rstrip("\r\n") if (line := sys.stdin.readline()) else None
        while True:
            try:
                self.reading = True
                return input(self.mark)
            except EOFError:
                write("\n")
                return None
            except KeyboardInterrupt as error:
                if getattr(error, "number", signal.SIGINT) != signal.SIGINT:
                    raise
                write("\n")
                note("Ctrl-D or /exit leaves")
            finally:
                self.reading = False

    def hear(self, pieces: Pieces) -> Iterator["tuple[str, Answer | None]"]:
        """An answer as it comes, until it ends or Ctrl-C is pressed."""
        if self.speaking is not None and self.speaking.thread.is_alive():
            self.waiting = True
            with progress.working(
                "waiting for the engine, which was stopped in the middle of a step"
            ):
                while self.waiting and not self.speaking.settle(LOOK_SECONDS):
                    pass
            if not self.waiting:
                return iter(())
            self.waiting = False
        self.speaking = Speaking(pieces)
        self.speaking.thread.start()  # now that an interrupt finds it
        return iter(self.speaking)


class Speaking:
    """Takes an answer from the engine in a thread, so that Ctrl-C is heard while the engine
    computes or compiles.
    """

    def __init__(self, pieces: Pieces):
        self.pieces = pieces
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.ended = False  # for whoever listens
        self.thread = threading.Thread(target=self.work, name="maxtext-answer", daemon=True)

    def work(self) -> None:
        try:
            with contextlib.closing(self.pieces) as pieces:  # a stopped engine lets the request go
                for piece in pieces:
                    if self.stopped.is_set():
                        return
                    self.queue.put(piece)
            self.queue.put(None)
        except BaseException as error:
            self.queue.put(error)

    def stop(self) -> None:
        """May be called by a signal handler."""
        self.stopped.set()
        self.queue.put(None)

    def __iter__(self) -> Iterator["tuple[str, Answer | None]"]:
        try:
            while not self.stopped.is_set():
                try:
                    item = self.queue.get(
                        timeout=LOOK_SECONDS
                    )  # a signal may come to another thread
                except queue.Empty:
                    continue
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.ended = True
            self.stopped.set()
            progress.stop()

    def settle(self, seconds: float) -> bool:
        """Wait until the engine is free, for so long at most; whether it is."""
        self.thread.join(seconds)
        return not self.thread.is_alive()


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
        note(
            "the model is told so from now on"
            if conversation.system
            else "the model is told nothing about its part"
        )
    else:
        note(f"there is no command {name}; /help lists them, and // begins a message with a slash")
    return True


def answer(conversation: "Conversation", text: str, keyboard: Keyboard) -> None:
    """Show what the model says to a message. What goes wrong is said, and the conversation goes on
    without it.
    """
    conversation.turns.append({"role": "user", "content": text})
    began, said, whole = time.perf_counter(), "", None  # `whole`: the answer, if it came to its end
    try:
        for piece, found in keyboard.hear(conversation.pieces()):
            write(piece)
            said, whole = said + piece, found
    except UserError as error:
        conversation.turns.pop()
        note(str(error))
        return
    write("\n" if whole else " … (stopped)\n" if said else "(stopped)\n")
    if not said:
        conversation.turns.pop()
        return
    conversation.turns.append({"role": "assistant", "content": said})
    if whole and whole.finished == "length":
        note(
            f"there was no more room: max_target_length={conversation.model.config.max_target_length}"
        )
    if whole and keyboard.person:
        count, seconds = len(whole.ids), time.perf_counter() - began
        note(f"{count:,} tokens, {count / max(seconds, 1e-9):,.1f} tokens/s")


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

    def pieces(self) -> Pieces:
        """The answer to the last turn, as it comes."""
        from maxtext.inference import Ask

        ids = self.fitted()
        seed = self.model.config.init_weights_seed + self.answers
        self.answers += 1
        return self.model.spoken(Ask(ids, self.model.room(ids), self.sampling, seed=seed))

    def fitted(self) -> list[int]:
        """The ids of the conversation, without its oldest turns where it has become too long."""
        whole = self.model.config.max_target_length
        most = (
            self.model.reserved or whole - whole // 4
        )  # of the room a quarter stays for the answer
        turns = list(self.turns)
        while len(ids := self.ids(turns)) > most and len(turns) > 1:
            del turns[:2]
        self.model.room(ids)  # a message that is too long by itself is refused, and costs no turn
        if len(turns) < len(self.turns) and not self.told:
            self.told = True
            note(
                f"the conversation is longer than max_target_length={whole} allows: its oldest turns are dropped"
            )
        self.turns = turns
        return ids

    def ids(self, turns: list[Mapping[str, Any]]) -> list[int]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        return self.model.conversation([*told, *turns])
