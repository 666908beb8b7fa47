"""Nested dicts of arrays: flat and nested forms, merging, and checksums of bits."""

import jax.numpy as jnp
import pytest

from maxtext.common.trees import checksum, flatten_dict, merge_dicts, unflatten_dict

TREE = {"b": {0: 1, "x": {"y": 2}}, "a": 3}
FLAT = {("b", 0): 1, ("b", "x", "y"): 2, ("a",): 3}


def test_flat_form_has_the_order_of_the_tree():
    assert list(flatten_dict(TREE).items()) == list(FLAT.items())
    assert unflatten_dict(FLAT) == TREE


def test_merges_leaves_of_both_and_prefers_the_second():
    merged = merge_dicts(TREE, {"b": {0: 4, "z": 5}, "c": {"d": 6}})
    assert merged == {"b": {0: 4, "x": {"y": 2}, "z": 5}, "a": 3, "c": {"d": 6}}
    assert TREE["b"][0] == 1


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ([jnp.array([1.0, -2.0])], 0x3F800000 + 0xC0000000),
        ([jnp.array([1.0], jnp.bfloat16)], 0x3F80),
        ([jnp.array([7, -1], jnp.int8)], 6),
        ([jnp.array(5), jnp.array(11)], 5 + 3 * 11),
    ],
    ids=["float32", "bfloat16", "int8", "two leaves"],
)
def test_checksum_adds_bits_modulo_2_to_the_32(tree, expected):
    assert int(checksum(tree)) == expected % 2**32
