"""Entry point of the command line. Importing this module changes what Ctrl-C does.

Python would print a traceback for a Ctrl-C before `main` has set its handlers; after this import
the process just ends.

Commands also have the module paths of MaxText: `python3 -m
maxtext.trainers.post_train.sft.train_sft` is `maxtext sft`. These modules have no files of their
own. `import maxtext` installs `AliasFinder`, which lets Python run this file under their names.
"""

import signal
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# Importing JAX makes a million objects that stay; with Python's 700, walking through them again and
# again takes 0.3 of the 2.4 seconds.
GC_THRESHOLD = 50_000


def entry(*command: str) -> None:
    """Run `maxtext COMMAND ...`; with a command given, `python3 -m maxtext.COMMAND ...`.

    Exits the process.
    """
    import contextlib
    import gc
    import os
    import sys

    gc.set_threshold(GC_THRESHOLD)
    open_closed_streams()
    from maxtext.cli.main import has_peers, main

    code = main([*command, *sys.argv[1:]])
    if code > 128:  # a compiling thread would delay the interpreter's own exit
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        if not has_peers():
            os._exit(code)
    sys.exit(code)


def open_closed_streams() -> None:
    """Open the standard streams that the process was started without (`2>&-`) on the null device:
    otherwise its next files and connections would get their numbers, and C libraries would write
    their messages into them.
    """
    import os
    import sys

    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            mode = "r" if name == "stdin" else "w"
            stream = os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace")
            setattr(sys, name, stream)


TYPE_CHECKING = False  # importing typing itself would be slow

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "maxtext.trainers.pre_train.train": "train",
    "maxtext.trainers.pre_train.train_compile": "compile",
    "maxtext.trainers.post_train.sft.sft_trainer": "sft",
    "maxtext.trainers.post_train.sft.train_sft": "sft",
    "maxtext.trainers.post_train.sft.train_sft_native": "sft",
    "maxtext.trainers.post_train.dpo.train_dpo": "dpo",
    "maxtext.trainers.post_train.distillation.train_distill": "distill",
    "maxtext.trainers.post_train.rl.train_rl": "grpo",
}
# The package was MaxText before, and had the commands of post-training at its top.
COMMANDS |= {
    name.replace("maxtext.trainers.post_train", "MaxText"): command
    for name, command in COMMANDS.items()
    if "post_train" in name
}
FOLDERS = {
    name.rsplit(".", depth)[0] for name in COMMANDS for depth in range(1, name.count("."))
} - {"maxtext.trainers"}


class AliasFinder:
    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in COMMANDS:
            return ModuleSpec(name, SourceFileLoader(name, __file__), origin=__file__)
        return ModuleSpec(name, None, is_package=True) if name in FOLDERS else None


if __name__ == "__main__":
    assert __spec__ is not None
    entry(COMMANDS[__spec__.name])
