"""`python3 -m MaxText.sft.sft_trainer`: the same as `maxtext sft`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("sft")
