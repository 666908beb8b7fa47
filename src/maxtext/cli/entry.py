"""Entry point of the command line. Importing this module changes what Ctrl-C does.

Python would print a traceback for a Ctrl-C before `main` has set its handlers; after this import
the process just ends.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def entry(*command: str) -> None:
    """Run `maxtext COMMAND ...`; with a command given, `python3 -m maxtext.COMMAND ...`.

    Exits the process.
    """
    import contextlib
    import os
    import sys

    from maxtext.cli.main import has_peers, main

    code = main([*command, *sys.argv[1:]])
    if code > 128:  # a compiling thread would delay the interpreter's own exit
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        if not has_peers():
            os._exit(code)
    sys.exit(code)
