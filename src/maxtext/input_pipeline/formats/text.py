"""kind=text: a file is one document, for any name of its column. Bytes that are not UTF-8 become
U+FFFD.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from maxtext.common.errors import ConfigError
from maxtext.input_pipeline.formats.interface import Record, check_index, missing_file_error


class TextFiles:
    """All files as one source: there may be many, and only their sizes are needed."""

    blocks = None

    def __init__(self, paths: Sequence[str], columns: Sequence[str], executor: Executor):
        self.paths, self.names = list(paths), list(columns) or ["text"]
        try:
            self.sizes = np.fromiter(
                executor.map(os.path.getsize, self.paths), np.int64, len(self.paths)
            )
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read ({error.strerror})") from error

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        check_index(index, len(self))
        # Read as bytes, since text mode would rewrite line ends.
        try:
            with open(self.paths[index], "rb") as file:
                text = file.read().decode("utf-8", errors="replace")
        except OSError as error:
            raise missing_file_error(self.paths[index], error) from error
        return dict.fromkeys(self.names, text)

    def where(self, index: int) -> tuple[str, str]:
        return self.paths[index], "the whole file"

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def decoded(self) -> int:
        return self.nbytes

    def columns(self) -> None:
        return None
