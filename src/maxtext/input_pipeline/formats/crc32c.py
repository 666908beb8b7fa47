"""CRC-32C (Castagnoli), the checksum of TFRecord files, in numpy: about 100 MB/s a thread, a byte
at a time would be 5.

The checksum is linear: that of a span of bytes is the exclusive or of what each byte gives at its
place. So a span is one look-up of all its bytes in a table [place, byte], and spans follow each
other by moving the state over a span of zeros, which is a look-up as well.
"""

from functools import cache

import numpy as np

POLYNOMIAL = 0x82F63B78  # reversed
SPAN = 512  # the table is 512 KiB and stays in the processor's cache
TOGETHER = 64  # spans in one look-up
ALL = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8


@cache
def table() -> np.ndarray:
    """uint32 [SPAN, 256]: what a byte gives at each place of a span."""
    single = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        single = np.where(single & 1, (single >> 1) ^ np.uint32(POLYNOMIAL), single >> 1).astype(
            np.uint32
        )
    places = [single]
    for _ in range(SPAN - 1):  # one more zero byte after it
        places.append((places[-1] >> 8) ^ single[places[-1] & 0xFF])
    return np.stack(places[::-1])


@cache
def moves() -> list[list[int]]:
    """For the four bytes of a state that moves over a span, as lists: these are looked up one by
    one.
    """
    return [row.tolist() for row in table()[:4]]


def crc32c(data: bytes) -> int:
    # The first span is filled up with zeros before the data, which give nothing.
    ahead = -len(data) % SPAN
    padded = np.zeros(ahead + len(data), np.uint8)
    padded[ahead:] = np.frombuffer(data, np.uint8)
    padded[ahead : ahead + 4] ^= (
        0xFF  # the state at the start, all ones, inverts the first four bytes
    )
    spans, rows = padded.reshape(-1, SPAN), np.arange(0, SPAN * 256, 256)
    first, second, third, fourth = moves()
    state = 0
    for start in range(0, len(spans), TOGETHER):
        places = spans[start : start + TOGETHER] + rows
        for span in np.bitwise_xor.reduce(table().ravel().take(places), axis=1).tolist():
            moved = (
                first[state & 0xFF]
                ^ second[state >> 8 & 0xFF]
                ^ third[state >> 16 & 0xFF]
                ^ fourth[state >> 24]
            )
            state = span ^ moved
    if len(data) < 4:
        state ^= ALL >> 8 * len(data)  # what fewer bytes leave of the state at the start
    return state ^ ALL


def masked(checksum: int) -> int:
    """As TFRecord files store it, so that a checksum of data with checksums in it is not a special
    case.
    """
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & ALL


def masked_of_lengths(lengths: np.ndarray) -> np.ndarray:
    """The masked checksums of uint64 lengths [n] in little endian."""
    places = lengths.astype("<u8").view(np.uint8).reshape(-1, 8).astype(np.intp)
    places[:, :4] ^= 0xFF
    rows = np.arange(SPAN - 8, SPAN) * 256
    checksums = np.bitwise_xor.reduce(table().ravel().take(places + rows), axis=1) ^ np.uint32(ALL)
    return (checksums >> 15 | checksums << 17) + np.uint32(MASK_DELTA)
