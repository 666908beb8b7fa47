"""A server of any ASGI application, and a client that sends bytes as they are."""

import contextlib
import socket
import time

from maxtext.inference.server.lifecycle import HttpServer, bind


@contextlib.contextmanager
def serve(app, tls=None):
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    server = HttpServer(app, listener, tls)
    server.start()
    try:
        yield address
    finally:
        server.stop()


def exchange(address, *parts, pause=0.0):
    """All that the server sends until it closes the connection."""
    received = b""
    with socket.create_connection(address, timeout=10) as connection:
        for part in parts:
            with contextlib.suppress(ConnectionError):
                connection.sendall(part)
            time.sleep(pause)
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(2**16):
                received += data
    return received
