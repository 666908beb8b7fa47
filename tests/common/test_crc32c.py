import sys

import google_crc32c
import numpy as np
import pytest

from maxtext.common import crc32c


def test_table_has_the_published_check_value():
    """The value of the Rocksoft catalogue for CRC-32C."""
    assert crc32c.table_crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("length", [0, 1, 7, 4096])
def test_table_equals_the_package(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c.table_crc32c(data) == google_crc32c.value(data)


def test_checksums_without_the_package_are_the_same(monkeypatch):
    expected = crc32c.masked_crc32c(b"a record")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    crc32c.crc32c_function.cache_clear()
    try:
        assert crc32c.crc32c_function() is crc32c.table_crc32c
        assert crc32c.masked_crc32c(b"a record") == expected
    finally:
        crc32c.crc32c_function.cache_clear()
