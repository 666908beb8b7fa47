"""`python3 -m maxtext VERB ...`: the same as `maxtext VERB ...`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
