"""`python3 -m maxtext.train FILE key=value ...`: the same as `maxtext train`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("train")
