"""CRC-32C (Castagnoli), the checksum of TFRecord files, in NumPy: about 100 MB/s in each thread;
one byte at a time would be 5 MB/s.

The checksum is linear: that of a span of bytes is the XOR of the contribution of each byte at its
position. So a span needs one look-up of all its bytes in a table [position, byte]. Spans are
chained by moving the state over a span of zeros, which is a look-up as well.
"""

from functools import cache

import numpy as np

POLYNOMIAL = 0x82F63B78  # reversed
SPAN = 512  # the table is 512 KiB and stays in the processor's cache
SPANS_AT_ONCE = 64
ALL = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8


@cache
def table() -> np.ndarray:
    """uint32 [SPAN, 256]: the contribution of a byte at each position of a span."""
    single = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        single = np.where(single & 1, (single >> 1) ^ np.uint32(POLYNOMIAL), single >> 1).astype(
            np.uint32
        )
    table_rows = [single]
    for _ in range(SPAN - 1):  # followed by one more zero byte
        table_rows.append((table_rows[-1] >> 8) ^ single[table_rows[-1] & 0xFF])
    return np.stack(table_rows[::-1])


@cache
def moves() -> list[list[int]]:
    """Tables for the four bytes of a state that moves over a span, as lists, which are faster than
    arrays for single look-ups.
    """
    return [row.tolist() for row in table()[:4]]


def crc32c(data: bytes) -> int:
    # The first span is padded with zeros before the data, which contribute nothing.
    padding = -len(data) % SPAN
    padded = np.zeros(padding + len(data), np.uint8)
    padded[padding:] = np.frombuffer(data, np.uint8)
    padded[padding : padding + 4] ^= 0xFF  # the initial state of ones inverts the first four bytes
    spans, rows = padded.reshape(-1, SPAN), np.arange(0, SPAN * 256, 256)
    first, second, third, fourth = moves()
    state = 0
    for start in range(0, len(spans), SPANS_AT_ONCE):
        table_rows = spans[start : start + SPANS_AT_ONCE] + rows
        for span in np.bitwise_xor.reduce(table().ravel().take(table_rows), axis=1).tolist():
            moved = (
                first[state & 0xFF]
                ^ second[state >> 8 & 0xFF]
                ^ third[state >> 16 & 0xFF]
                ^ fourth[state >> 24]
            )
            state = span ^ moved
    if len(data) < 4:
        state ^= ALL >> 8 * len(data)  # the rest of the initial state
    return state ^ ALL


def masked(checksum: int) -> int:
    """The masked checksum that TFRecord files store, so that checksums of data that contains
    checksums are not degenerate.
    """
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & ALL


def masked_of_lengths(lengths: np.ndarray) -> np.ndarray:
    """The masked checksums of uint64 lengths [n] in little endian."""
    table_rows = lengths.astype("<u8").view(np.uint8).reshape(-1, 8).astype(np.intp)
    table_rows[:, :4] ^= 0xFF
    rows = np.arange(SPAN - 8, SPAN) * 256
    checksums = np.bitwise_xor.reduce(table().ravel().take(table_rows + rows), axis=1) ^ np.uint32(
        ALL
    )
    return (checksums >> 15 | checksums << 17) + np.uint32(MASK_DELTA)
