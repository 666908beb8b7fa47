"""`maxtext convert`: checkpoints from Hugging Face's form to ours and back, and weights out of training checkpoints."""

import sys
from pathlib import Path

from maxtext.cli import words as cli_words
from maxtext.common.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def run(words: list[str]) -> int:
    dtype = cli_words.take_option(words, "--dtype", DTYPES)
    if len(words) != 3 or words[0] not in ("from_hf", "to_hf", "params-only"):
        raise ConfigError(
            "give a direction and two folders: maxtext convert from_hf DIR OUT, to_hf CHECKPOINT OUT, or "
            "params-only CHECKPOINT OUT"
        )
    from maxtext.checkpoint.convert.command import from_folder, from_training, to_folder

    what, source, out = words
    convert = {"from_hf": from_folder, "to_hf": to_folder, "params-only": from_training}[what]
    with Bar(f"{source} -> {out}") as progress:
        convert(source, out, dtype, progress)
    print(f"wrote {Path(out)}")
    return 0


class Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, title: str):
        self.title = title

    def __enter__(self):
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task(self.title, total=None)
        return lambda done, total, name: self.bar.update(task, completed=done, total=total, description=name[-48:])

    def __exit__(self, *error) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()
