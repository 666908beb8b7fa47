"""`python3 -m maxtext.sft_trainer FILE key=value ...`: the same as `maxtext sft`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("sft")
