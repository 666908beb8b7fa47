"""`python3 -m maxtext VERB ...`: the same as `maxtext VERB ...`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry()
