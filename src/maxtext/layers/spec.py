"""Marks on the fields of layer specs."""

# Metadata of a field that chooses how a layer computes its output, or that only training uses:
# specs that differ in such fields alone compute the same from the same weights.
IMPLEMENTATION = {"affects_output": False}
