"""The scanner of JSON objects, compared with the standard library."""

import json
import random

import pytest

from maxtext.inference.text.parsers.json_scanner import JsonScanner

OBJECT = '{"a": [1, -2.5e+3, {"b": null}, []], "c\\u00e9\\"": "x\\ny}", "d": {"e": true, "f": {}}} '


def refuse(text):
    raise ValueError(text)


def is_object(text):
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def scan(text, size):
    """(scanner, number of characters of the object)."""
    scanner, total = JsonScanner(), 0
    for start in range(0, len(text), size):
        count = scanner.add(text[start : start + size])
        total += count
        if count < size:
            break
    return scanner, total


def test_end_of_an_object():
    for size in (1, 2, 7, 1000):
        scanner, total = scan(OBJECT + "rest", size)
        assert scanner.is_complete
        assert total == len(OBJECT.rstrip())


def test_every_beginning_is_valid():
    for end in range(len(OBJECT.rstrip())):
        scanner, total = scan(OBJECT[:end], 3)
        assert (scanner.is_complete, scanner.is_invalid, total) == (False, False, end)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_changed_objects_are_judged_as_by_the_standard_library(size):
    generator = random.Random(size)
    num_valid = 0
    for _ in range(2000):
        letters = list(OBJECT.rstrip())
        for _ in range(generator.randint(1, 2)):
            index = generator.randrange(len(letters))
            letters[index] = generator.choice(["", letters[index] * 2, *'{}[]",:0x\\-.e\n '])
        text = "".join(letters)
        scanner, total = scan(text, size)
        is_valid = scanner.is_complete and not text[total:].strip()
        assert is_valid == is_object(text), text
        num_valid += is_valid
    assert 200 < num_valid < 1800


def test_first_value():
    text = '{ "x": "y"}'
    flags = []
    scanner = JsonScanner()
    for letter in text:
        scanner.add(letter)
        flags.append(scanner.has_value)
    assert flags.index(True) == text.index('"y')


def test_depth_has_no_limit():
    depth = 100_000
    text = '{"a":' * depth + "1" + "}" * depth
    scanner, total = scan(text, 1000)
    assert (scanner.is_complete, total) == (True, len(text))
