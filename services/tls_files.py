"""PEM files, read and looked through before gRPC gets them, which would say of a bad one only that no call succeeds."""

from __future__ import annotations

import ssl
from pathlib import Path

from services.errors import StartupError


def read_pem(path: Path) -> bytes:
    """What a PEM file holds. Raises StartupError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from None
    if b"-----BEGIN" not in data:
        raise StartupError(f"{path} is no PEM file.")
    return data


def read_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """A certificate and its private key. Raises StartupError, also when they do not belong together."""
    pair = read_pem(cert), read_pem(key)
    try:
        # Without a password to give, a key that needs one is refused instead of asked for on the terminal.
        _context().load_cert_chain(cert, key, password="")
    except (OSError, ValueError):
        raise StartupError(
            f"{cert} and {key} are no matching certificate and key in PEM, or the key needs a password."
        ) from None
    return pair


def read_ca(path: Path) -> bytes:
    """The certificates of authorities. Raises StartupError."""
    data = read_pem(path)
    try:
        _context().load_verify_locations(path)
    except (OSError, ValueError):
        raise StartupError(f"{path} holds no certificate in PEM.") from None
    return data


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
