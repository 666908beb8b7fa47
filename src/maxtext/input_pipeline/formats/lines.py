"""The index of the lines of a file, from one fast pass over its bytes. Blank lines are skipped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

WHITE = b" \t\r\n"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of a UTF-8 file


@dataclass
class LineIndex:
    """Line `i` is the bytes from `offsets[i]` to `offsets[i + 1]`, with its line end and any blank
    lines after it.
    """

    offsets: np.ndarray  # [lines + 1]
    blanks: np.ndarray  # for each blank line, the number of other lines before it
    head: list[bytes] = field(default_factory=list)  # the first few lines

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def number(self, index: int) -> int:
        """The number of a line in an editor, from 1."""
        return index + 1 + int(np.searchsorted(self.blanks, index, side="right"))


def index_lines(chunks: Iterable[bytes], head: int) -> LineIndex:
    """Index the lines of a file that is read in chunks, and keep its first `head` lines."""
    first: list[bytes] = []
    begins, blanks, total, offset = [], [], 0, 0
    for data in split_at_line_ends(chunks):
        mark = len(BYTE_ORDER_MARK) if offset == 0 and data.startswith(BYTE_ORDER_MARK) else 0
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(array == ord("\n")) + 1
        if not len(ends) or ends[-1] < len(data):  # the last line of a file needs no end
            ends = np.append(ends, len(data))
        starts = np.concatenate([[mark], ends[:-1]])
        # A mark and nothing else leaves a start past the end.
        white = np.flatnonzero(
            np.isin(array[np.minimum(starts, len(array) - 1)], np.frombuffer(WHITE, np.uint8))
        )
        blank = np.array(
            [line for line in white if not data[starts[line] : ends[line]].strip(WHITE)], np.int64
        )
        blanks.append(total + blank - np.arange(len(blank)))
        nonblank = np.delete(starts, blank)
        for start in nonblank[: head - len(first)]:
            end = data.find(b"\n", start)
            first.append(data[start : end if end >= 0 else len(data)])
        begins.append(nonblank + offset)
        total += len(nonblank)
        offset += len(data)
    # Half the memory for files below 4 GiB.
    kind = np.uint32 if offset < 2**32 else np.uint64
    offsets = np.concatenate([part.astype(kind) for part in begins] + [np.array([offset], kind)])
    return LineIndex(offsets, np.concatenate([np.zeros(0, np.int64), *blanks]), first)


def split_at_line_ends(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks that end with a line end."""
    waiting: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join([*waiting, chunk[:cut]])
            waiting = [chunk[cut:]] if cut < len(chunk) else []
        else:
            waiting.append(chunk)
    if waiting:
        yield b"".join(waiting)
