"""Commands at their paths in MaxText; the code is in the folders above."""
