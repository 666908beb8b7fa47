"""The process of a command. Only for entry points: importing it changes what Ctrl-C does.

Python itself answers a Ctrl-C that comes before `main` has set its handlers with a traceback; from
here on the process just ends.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def entry(*verb: str) -> None:
    """`maxtext VERB ...`, or with a verb given `python3 -m maxtext.VERB ...`. Exits the process."""
    import contextlib
    import os
    import sys

    from maxtext.cli.main import in_company, main

    code = main([*verb, *sys.argv[1:]])
    if code > 128:  # a thread that still compiles would hold up the interpreter's own exit
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        if not in_company():
            os._exit(code)
    sys.exit(code)
