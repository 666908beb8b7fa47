"""CRC-32C (Castagnoli) as TFRecord and TensorBoard event files store it.

google-crc32c is in the base install. Where it is missing, such as on a machine to which the source
was copied, a table of 256 entries computes the same at a few MB/s.
"""

import functools
from collections.abc import Callable

ALL = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8
POLYNOMIAL = 0x82F63B78  # reversed: the lowest bit is the highest power


def masked_crc32c(data: bytes) -> int:
    """The checksum, rotated by 15 bits plus a constant: a checksum of data that contains checksums
    would be degenerate.
    """
    checksum = crc32c_function()(data)
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & ALL


@functools.cache
def crc32c_function() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError:
        return table_crc32c
    return google_crc32c.value


def table_crc32c(data: bytes) -> int:
    """The checksum, a byte at a time."""
    table = remainders()
    checksum = ALL
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ ALL


@functools.cache
def remainders() -> list[int]:
    """The remainder of each byte, divided by the polynomial."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = remainder >> 1 ^ (POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return table
