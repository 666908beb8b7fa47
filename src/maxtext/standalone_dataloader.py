"""`python3 -m maxtext.standalone_dataloader FILE key=value ...`: the same as `maxtext data throughput`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "throughput", *sys.argv[1:]]))
