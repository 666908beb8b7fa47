"""`python3 -m maxtext.decode FILE key=value ...`: the same as `maxtext decode`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("decode")
