"""`maxtext convert`: checkpoints from Hugging Face's form to ours and back, and weights out of
training checkpoints.
"""

import shlex
import sys

from maxtext.cli import arguments
from maxtext.common.errors import ConfigError
from maxtext.common.files import local_path
from maxtext.common.hardware import format_bytes

DTYPES = ("float32", "bfloat16", "float16")


def run(args: list[str]) -> int:
    dtype = arguments.take_option(args, "--dtype", DTYPES)
    text_only = arguments.take_flag(args, "--text-only")
    if len(args) != 3 or args[0] not in ("from_hf", "to_hf", "params-only"):
        raise ConfigError(
            "give a direction and two folders: maxtext convert from_hf DIR OUT, to_hf CHECKPOINT OUT, or "
            "params-only CHECKPOINT OUT"
        )
    from maxtext.checkpoint.convert.command import from_folder, from_training, to_folder
    from maxtext.checkpoint.safetensors_reader import HF_STEM, NATIVE_STEM

    what, source, out = args
    if text_only and what != "to_hf":
        raise ConfigError(
            f"--text-only would do nothing in maxtext convert {what}: it is for to_hf"
        )
    with Bar(f"{source} -> {out}") as progress:
        if what == "to_hf":
            to_folder(source, out, dtype, progress, text_only)
        else:
            {"from_hf": from_folder, "params-only": from_training}[what](
                source, out, dtype, progress
            )
    print(summary(out, HF_STEM if what == "to_hf" else NATIVE_STEM))
    return 0


def summary(out: str, stem: str) -> str:
    """What a folder of weights holds, read from its headers, and a command that uses it."""
    from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
    from maxtext.tokenizers.load import tokenizer_files

    folder = local_path(out)
    tensors = SafetensorsFolder.open(folder, stem).tensors.values()
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    command = f"maxtext decode load_parameters_path={shlex.quote(out)} prompt='I love to'"
    if not tokenizer_files(folder.iterdir()):
        command += " tokenizer_path=TOKENIZER, the one that it was trained with"
    return f"wrote {out}: {len(tensors):,} tensors, {dtypes}, {format_bytes(nbytes)}\ntry it with: {command}"


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, title: str):
        self.title = title

    def __enter__(self):
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task(self.title, total=None)
        return lambda done, total, name: self.bar.update(
            task, completed=done, total=total, description=name[-48:]
        )

    def __exit__(self, *error) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()
