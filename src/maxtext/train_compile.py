"""`python3 -m maxtext.train_compile FILE key=value ...`: the same as `maxtext compile`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compile", *sys.argv[1:]]))
