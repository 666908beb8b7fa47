"""`python3 -m maxtext.train FILE key=value ...`: the same as `maxtext train`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
