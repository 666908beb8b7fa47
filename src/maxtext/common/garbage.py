"""Python's garbage collector in processes that run for long."""

import gc


def freeze_objects() -> None:
    """Leave all objects that exist now out of later collections. For a process that has loaded and
    compiled what it needs: a collection stops all threads, and would visit millions of objects that
    live as long as the process."""
    gc.collect()
    gc.freeze()
