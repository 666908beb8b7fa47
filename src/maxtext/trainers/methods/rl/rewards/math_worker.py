"""The process that compares mathematical answers with math-verify; see math_equality.py."""

from multiprocessing.connection import Connection


def work(descriptor: int) -> None:
    """Answers each (right, other) with whether they are equal, until the socket closes."""
    from math_verify import parse, verify  # sympy takes a second to import

    connection = Connection(descriptor)
    while True:
        try:
            texts = connection.recv()
        except EOFError:
            return
        try:
            right, other = (parse(f"\\boxed{{{text}}}") for text in texts)
            connection.send(bool(verify(right, other)))
        except Exception:  # of sympy, which may raise anything: the answer cannot be read
            connection.send(False)
