"""`python3 -m maxtext.decode FILE key=value ...`: the same as `maxtext decode`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["decode", *sys.argv[1:]]))
