"""`maxtext chat`: a conversation in the terminal, with a model or with a server.

In a pipe, each line of standard input is a message or a command, and standard output is the
model's messages.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.conversation import Conversation, Deltas, LocalConversation, ReplyDelta
from maxtext.cli.generation import (
    DIM,
    load_session,
    note,
    refuse_useless,
    resolve_named_model,
    supports_style,
    write,
)
from maxtext.common import progress, signals
from maxtext.common.errors import UserError

PROMPT_SIGN = "> "
POLL_SECONDS = 0.1
EXIT_SECONDS = 2.0  # to wait for a step of the engine at the end of the program
# \x01 and \x02 enclose what readline must not count as width.
BOLD_PROMPT_SIGN = "\x01\x1b[1m\x02> \x01\x1b[0m\x02"
HELP = """\
/reset         clear the conversation
/system TEXT   set the system message from now on; without TEXT remove it
/help          list the commands
/exit          leave, as Ctrl-D does
Ctrl-C stops a reply. Write a message that begins with / with two: //."""
USAGE = "maxtext chat MODEL, or maxtext chat --server URL"
USELESS = {
    "prompt": "type it",
    "multi_sampling": "a conversation has one reply to a message",
    "enable_model_warmup": "the first message warms it up",
    "return_log_prob": "use `maxtext decode` or `maxtext batch`",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}


def run(arguments: Arguments) -> int:
    if arguments["--server"] is None:
        conversation = load_conversation(arguments)
    else:
        from maxtext.cli.conversation import connect

        conversation = connect(arguments)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    progress.stop()
    if interactive:
        note(f"{conversation.title}; /help lists the commands")
    with Terminal(interactive) as terminal:
        while (line := terminal.read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not run_command(conversation, line):
                    break
            else:
                message = line.removeprefix("/") if line.startswith("//") else line
                reply(conversation, message, terminal)
    return 0


def load_conversation(arguments: Arguments) -> Conversation:
    """A conversation with a model that is loaded here."""
    file, overrides = positionals.split(arguments.all_args, data=None, presets=False)
    model = resolve_named_model(USAGE, file, overrides)
    refuse_useless(model.config, "chat", USELESS)
    session = load_session(model)
    return LocalConversation(session, f"{model.path}, loaded in {session.load_seconds:.1f} s")


class Terminal:
    """Reads messages and streams replies. On a terminal, Ctrl-C clears the line that is typed or
    stops the reply, and never ends the program, which Ctrl-D and /exit do. In a pipe, an interrupt
    outside of a reply ends the program.
    """

    def __init__(self, interactive: bool):
        self.interactive = interactive
        self.reading = False
        self.waiting = False  # until the engine has finished a step that was interrupted
        self.reply: ReplyThread | None = None
        self.prompt_sign = PROMPT_SIGN
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its editing and history)

                self.prompt_sign = BOLD_PROMPT_SIGN if supports_style(sys.stdout) else PROMPT_SIGN

    def __enter__(self) -> "Terminal":
        self.previous_handler = signal.signal(signal.SIGINT, self.on_interrupt)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        signal.signal(signal.SIGINT, self.previous_handler)
        # A thread that compiles cannot be stopped, and the interpreter must not exit during it.
        if self.reply is not None and not self.reply.join(EXIT_SECONDS):
            sys.stdout.flush()
            os._exit(0 if error is None else signals.exit_code_of(error))

    def on_interrupt(self, number: int, frame: object) -> None:
        if self.reply is not None and not self.reply.ended:
            self.reply.stop()
        elif self.waiting:
            self.waiting = False
        elif self.reading or not self.interactive:
            raise signals.Interrupted(number)

    def read(self) -> str | None:
        """The next line, None at the end of the input."""
        if not self.interactive:
            return line.rstrip("\r\n") if (line := sys.stdin.readline()) else None
        while True:
            try:
                self.reading = True
                return input(self.prompt_sign)
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

    def stream(self, conversation: Conversation) -> Iterator[ReplyDelta]:
        """A reply as deltas, until it is complete or Ctrl-C is pressed."""
        if self.reply is not None and self.reply.thread.is_alive():
            self.waiting = True
            with progress.working("waiting for the end of an interrupted step"):
                while self.waiting and not self.reply.join(POLL_SECONDS):
                    pass
            if not self.waiting:
                return iter(())
            self.waiting = False
        self.reply = ReplyThread(conversation.stream(), conversation.abort)
        self.reply.thread.start()  # after the assignment: an interrupt stops it from here on
        return iter(self.reply)


class ReplyThread:
    """Takes the deltas in a thread, so that Ctrl-C is handled while the engine computes or
    compiles. `abort` is called when the reply is stopped.
    """

    def __init__(self, deltas: Deltas, abort: Callable[[], None]):
        self.deltas = deltas
        self.abort = abort
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.ended = False  # for the consumer
        self.thread = threading.Thread(target=self.work, name="maxtext-reply", daemon=True)

    def work(self) -> None:
        try:
            with contextlib.closing(self.deltas) as deltas:  # closing aborts the request
                for delta in deltas:
                    if self.stopped.is_set():
                        return
                    self.queue.put(delta)
            self.queue.put(None)
        except BaseException as error:
            self.queue.put(error)

    def stop(self) -> None:
        """May be called by a signal handler."""
        self.stopped.set()
        self.abort()
        self.queue.put(None)

    def __iter__(self) -> Iterator[ReplyDelta]:
        try:
            while not self.stopped.is_set():
                try:
                    # With a timeout, since another thread may receive the signal.
                    item = self.queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                # When the reply is stopped, its thread may report the end of its connection.
                if item is None or self.stopped.is_set():
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.ended = True
            self.stopped.set()
            progress.stop()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the engine; returns whether it is free."""
        self.thread.join(seconds)
        return not self.thread.is_alive()


def run_command(conversation: Conversation, line: str) -> bool:
    """Run a line that begins with a slash; returns whether the conversation goes on."""
    name, _, rest = line.strip().partition(" ")
    if name == "/exit":
        return False
    if name == "/help":
        note(HELP)
    elif name == "/reset":
        conversation.messages.clear()
        note("the conversation is cleared")
    elif name == "/system":
        conversation.system = rest.strip()
        note(
            "the system message is set" if conversation.system else "the system message is removed"
        )
    else:
        note(f"there is no command {name}; /help lists them, and // begins a message with a slash")
    return True


def reply(conversation: Conversation, text: str, terminal: Terminal) -> None:
    """Stream the model's reply to a message. If that fails, the error is shown, and the
    conversation goes on without the message.
    """
    conversation.messages.append({"role": "user", "content": text})
    start, reply_text, end = time.perf_counter(), "", None
    is_thinking = False
    try:
        for delta in terminal.stream(conversation):
            if delta.reasoning and terminal.interactive:
                write(delta.reasoning, DIM)
                is_thinking = True
            if delta.text and is_thinking:
                write("\n\n")
                is_thinking = False
            write(delta.text)
            reply_text += delta.text
            end = delta.end
    except UserError as error:
        conversation.messages.pop()
        if reply_text or is_thinking:
            write("\n")
        note(str(error))
        return
    write("\n" if end else " … (stopped)\n" if reply_text else "(stopped)\n")
    if end and end.remark:
        note(end.remark)
    if not reply_text:
        conversation.messages.pop()
        return
    conversation.messages.append({"role": "assistant", "content": reply_text})
    if end and end.num_tokens and terminal.interactive:
        seconds = time.perf_counter() - start
        note(f"{end.num_tokens:,} tokens, {end.num_tokens / max(seconds, 1e-9):,.1f} tokens/s")
