"""`maxtext chat`: a conversation with a model in the terminal.

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
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from maxtext.cli import arguments
from maxtext.cli.generation import (
    GenerationSession,
    load_session,
    note,
    refuse_useless,
    resolve_model,
    supports_style,
    write,
)
from maxtext.common import progress, signals
from maxtext.common.errors import ConfigError, UserError

if TYPE_CHECKING:
    from maxtext.inference import Completion

Deltas = Generator["tuple[str, Completion | None]", None, None]
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
USELESS = {
    "prompt": "type it",
    "load_parameters_path": "the path after `chat` names the model",
    "multi_sampling": "a conversation has one reply to a message",
    "enable_model_warmup": "the first message warms it up",
    "return_log_prob": "use `maxtext decode` or `maxtext batch`",
    "autoregressive_decode_assert": "it is about the completion of `maxtext decode`",
}


def run(args: list[str]) -> int:
    if not args or args[0].startswith("-") or "=" in args[0]:
        raise ConfigError("which model? maxtext chat DIR [key=value ...]")
    adapter = arguments.take_adapter(args)
    path, *overrides = args
    overrides += adapter
    model = resolve_model(path, None, overrides)
    refuse_useless(model.config, "chat", USELESS)
    session = load_session(model)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    conversation = Conversation(session)
    progress.stop()
    if interactive:
        note(f"{path}, loaded in {session.load_seconds:.1f} s; /help lists the commands")
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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

    def stream(self, deltas: Deltas) -> Iterator["tuple[str, Completion | None]"]:
        """A reply as text deltas, until it is complete or Ctrl-C is pressed."""
        if self.reply is not None and self.reply.thread.is_alive():
            self.waiting = True
            with progress.working("waiting for the engine to finish an interrupted step"):
                while self.waiting and not self.reply.join(POLL_SECONDS):
                    pass
            if not self.waiting:
                return iter(())
            self.waiting = False
        self.reply = ReplyThread(deltas)
        self.reply.thread.start()  # after the assignment: an interrupt stops it from here on
        return iter(self.reply)


class ReplyThread:
    """Runs the engine in a thread, so that Ctrl-C is handled while the engine computes or
    compiles.
    """

    def __init__(self, deltas: Deltas):
        self.deltas = deltas
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
        self.queue.put(None)

    def __iter__(self) -> Iterator["tuple[str, Completion | None]"]:
        try:
            while not self.stopped.is_set():
                try:
                    # With a timeout, since another thread may receive the signal.
                    item = self.queue.get(timeout=POLL_SECONDS)
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

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the engine; returns whether it is free."""
        self.thread.join(seconds)
        return not self.thread.is_alive()


def run_command(conversation: "Conversation", line: str) -> bool:
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


def reply(conversation: "Conversation", text: str, terminal: Terminal) -> None:
    """Stream the model's reply to a message. If that fails, the error is shown, and the
    conversation goes on without the message.
    """
    conversation.messages.append({"role": "user", "content": text})
    start, reply_text, completion = time.perf_counter(), "", None
    try:
        for text_delta, result in terminal.stream(conversation.stream()):
            write(text_delta)
            reply_text += text_delta
            completion = result
    except UserError as error:
        conversation.messages.pop()
        note(str(error))
        return
    write("\n" if completion else " … (stopped)\n" if reply_text else "(stopped)\n")
    if not reply_text:
        conversation.messages.pop()
        return
    conversation.messages.append({"role": "assistant", "content": reply_text})
    if completion and completion.finish_reason == "length":
        limit = conversation.session.config.max_target_length
        note(f"the reply ends at max_target_length={limit}")
    if completion and terminal.interactive:
        count, seconds = len(completion.token_ids), time.perf_counter() - start
        note(f"{count:,} tokens, {count / max(seconds, 1e-9):,.1f} tokens/s")


class Conversation:
    """The messages so far, as many of them as fit in max_target_length."""

    def __init__(self, session: GenerationSession):
        from maxtext.inference import SamplingParams

        self.session = session
        self.params = SamplingParams.from_config(session.config)
        self.system = ""
        self.messages: list[Mapping[str, Any]] = []
        self.noted_truncation = False
        self.num_replies = 0
        _ = session.chat_template  # a model that cannot chat is refused before anything is typed

    def stream(self) -> Deltas:
        """The reply to the last message, as text deltas."""
        from maxtext.inference import GenerationRequest

        prompt_ids = self.truncated_prompt()
        params = replace(
            self.params,
            max_new_tokens=self.session.max_new_tokens(prompt_ids),
            seed=self.session.config.init_weights_seed + self.num_replies,
        )
        self.num_replies += 1
        return self.session.stream(GenerationRequest(prompt_ids, params))

    def truncated_prompt(self) -> list[int]:
        """The ids of the conversation, without its oldest messages where it has become too long."""
        limit = self.session.config.max_target_length
        # A quarter of the sequence is left for the reply.
        max_prompt = self.session.reserved_prompt_tokens or limit - limit // 4
        messages = list(self.messages)
        while len(ids := self.encode(messages)) > max_prompt and len(messages) > 1:
            del messages[:2]
        self.session.max_new_tokens(ids)  # raises before messages are dropped for good
        if len(messages) < len(self.messages) and not self.noted_truncation:
            self.noted_truncation = True
            note(
                f"the conversation exceeds max_target_length={limit}: its oldest messages are "
                "dropped"
            )
        self.messages = messages
        return ids

    def encode(self, messages: list[Mapping[str, Any]]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.session.encode_chat([*system, *messages])
