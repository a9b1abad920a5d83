"""A server behind a door that opens late: the system makes connections at once, and nobody accepts them yet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHUNK_BYTES = 1 << 16


@contextmanager
def late_door(path: Path, server: Path, opens: threading.Event) -> Iterator[str]:
    """The address of a socket at `path` behind which `server` answers, another socket's path, once `opens` is set."""
    made: list[socket.socket] = []
    closing = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        thread = threading.Thread(target=_admit, args=(listener, server, opens, closing, made))
        thread.start()
        try:
            yield f"unix:{path}"
        finally:
            closing.set()
            opens.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in made:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def _admit(
    listener: socket.socket, server: Path, opens: threading.Event, closing: threading.Event, made: list[socket.socket]
) -> None:
    opens.wait()
    with suppress(OSError):
        while not closing.is_set():
            inside, _ = listener.accept()
            outside = socket.socket(socket.AF_UNIX)
            outside.connect(str(server))
            made += [inside, outside]
            for source, target in ((inside, outside), (outside, inside)):
                threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
