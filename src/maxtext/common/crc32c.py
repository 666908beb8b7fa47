"""CRC-32C (Castagnoli) as TFRecord and TensorBoard event files store it."""

import google_crc32c

ALL = 0xFFFFFFFF
MASK_DELTA = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """The checksum, rotated by 15 bits plus a constant: a checksum of data that contains checksums
    would be degenerate.
    """
    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + MASK_DELTA) & ALL
