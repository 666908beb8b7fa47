"""The `maxtext` command line: runs a command, and turns errors into messages and exit codes.

Only the standard library is imported here, so that help is instant. arguments.py parses the
arguments by the rows of options.py, and the module of a command is imported when it runs.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable

from maxtext.cli.arguments import COMMON, command_help, parse
from maxtext.cli.commands import COMMANDS
from maxtext.common import progress, signals

# What other programs call a command
SYNONYMS = {
    "finetune": "sft",
    "fine-tune": "sft",
    "lora": "sft",
    "pretrain": "train",
    "rl": "grpo",
    "generate": "decode",
    "run": "chat",
    "api": "serve",
    "benchmark": "bench",
    "score": "eval",
    "merge": "convert merge-adapter",
    "export": "convert to_hf",
    "info": "inspect",
    "list": "models",
}


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: maxtext COMMAND [FILE] [key=value ...]\n\n"
        "Training and inference of open language models in JAX.\n\n"
        + "\n".join(lines)
        + f"\n\n{COMMON}\nexample: {COMMANDS['config'].example}\n"
        "`maxtext COMMAND --help` shows its options; `maxtext --version` prints the version.\n"
    )


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    with signals.interrupt_on_signals():
        try:
            return run(args)
        except BrokenPipeError:  # `maxtext config | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt as error:
            return interrupted(error)
        except Exception as error:
            # An import that is interrupted may raise another exception.
            if (interrupt := signals.pending()) is not None:
                return interrupted(interrupt)
            return failed(error, debug)


def interrupted(error: KeyboardInterrupt) -> int:
    """Report that a signal ended the command and return its exit code."""
    signals.consume()
    with contextlib.suppress(OSError):
        print(signals.message_of(error), file=sys.stderr)
    return leave(signals.exit_code_of(error))


def failed(error: Exception, debug: bool) -> int:
    """Print the message of an error and return its exit code. Re-raises errors that are not the
    user's.
    """
    from maxtext.common.errors import UserError, lost_peer, out_of_memory

    user_error = error if isinstance(error, UserError) else out_of_memory(error)
    if user_error is None and has_peers():
        user_error = lost_peer(error)
    if debug or user_error is None:
        leave(1, traceback.print_exc)
        raise error
    for line in str(user_error).splitlines():
        shown = line.encode(errors="backslashreplace").decode()  # bytes of argv that are not UTF-8
        print(f"maxtext: error: {shown}", file=sys.stderr)
    if user_error.details:
        print(user_error.details.rstrip(), file=sys.stderr)
    return leave(user_error.exit_code)


def has_peers() -> bool:
    """Whether this process is one of several."""
    from maxtext.common import processes

    return processes.world().count > 1


def leave(code: int, before_exit: Callable[[], None] | None = None) -> int:
    """Exit without waiting for the other processes; see common/processes.py."""
    from maxtext.common import processes

    return processes.exit_process(code, before_exit)


def run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if args[0] == "--version":
        from importlib import metadata

        print(f"maxtext {metadata.version('maxtext')}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        from maxtext.common.errors import ConfigError
        from maxtext.configs.sources import suggest

        synonym = SYNONYMS.get(name.lower())
        hint = f"; did you mean {synonym}?" if synonym else suggest(name, COMMANDS)
        hint = hint or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}{hint}")
    command = COMMANDS[name]
    if any(arg in ("-h", "--help") for arg in rest):
        print(command_help(name, command), end="")
        return 0
    arguments = parse(name, command, rest)
    from maxtext.common import log

    # The imports take seconds.
    with log.early_warnings(), progress.working(f"maxtext {name} is starting"):
        with signals.starting_service() if name == "serve" else contextlib.nullcontext():
            module = importlib.import_module(f"maxtext.cli.{arguments.module}")
        return module.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
