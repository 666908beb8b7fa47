"""`python3 -m maxtext.standalone_dataloader FILE key=value ...`: the same as `maxtext data
throughput`.
"""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("data", "throughput")
