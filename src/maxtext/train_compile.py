"""`python3 -m maxtext.train_compile FILE key=value ...`: the same as `maxtext compile`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("compile")
