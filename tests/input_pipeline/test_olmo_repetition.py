"""The repetition filter against a brute-force count of consecutive n-gram copies."""

import random

import numpy as np
import pytest

from maxtext.input_pipeline.olmo import is_repetitive


def copies_in_a_row(tokens: list[int], start: int, size: int) -> int:
    gram, count = tokens[start : start + size], 0
    while tokens[start + count * size : start + (count + 1) * size] == gram:
        count += 1
    return count


def repetitive_by_counting(tokens: list[int]) -> bool:
    return any(
        copies_in_a_row(tokens, start, size) >= 32
        for size in range(1, 14)
        for start in range(len(tokens) - size + 1)
    )


def test_matches_brute_force_count_on_random_and_planted_repetitions():
    generator = random.Random(3)
    repetitive = []
    for trial in range(150):
        # Few different tokens make repetitions by chance, and odd ones at the edges of the planted.
        letters = generator.choice([2, 4, 1000])
        tokens = [generator.randrange(letters) for _ in range(generator.randint(0, 200))]
        gram = [generator.randrange(letters) for _ in range(generator.randint(1, 16))]
        planted = gram * generator.randint(30, 33) + gram[: generator.randrange(len(gram))]
        if trial % 5:
            start = generator.randint(0, len(tokens))
            tokens = tokens[:start] + planted + tokens[start:]
        expected = repetitive_by_counting(tokens)
        assert is_repetitive(np.array(tokens, np.uint32)) == expected, (trial, gram)
        repetitive.append(expected)
    assert 30 < sum(repetitive) < 120  # both answers occur


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize("size", [1, 2, 7, 13])
def test_threshold_is_exactly_32_repetitions(size, dtype):
    many = np.tile(np.arange(size), 32).astype(dtype)
    around = np.arange(100, 110).astype(dtype)
    assert is_repetitive(many)
    assert is_repetitive(np.concatenate([around, many, around]))
    assert not is_repetitive(many[1:])
    assert not is_repetitive(np.concatenate([around, many[:-1], around]))


def test_ignores_ngrams_over_13_and_short_sequences():
    assert not is_repetitive(np.tile(np.arange(14), 100))
    for length in (0, 1, 5, 31):
        assert not is_repetitive(np.zeros(length, np.uint16))
    assert is_repetitive(np.zeros(32, np.uint16))


def test_separate_repetitions_are_not_summed():
    half = np.tile([1, 2, 3], 20)
    assert not is_repetitive(np.concatenate([half, [9], half]))
    assert is_repetitive(np.concatenate([half, half]))
