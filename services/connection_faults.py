"""What keeps a client from a server that is there: TLS, as gRPC tells of it, in a sentence that says what to do."""

from __future__ import annotations

import re

_NOT_CONNECTED = "failed to connect"
_VERIFY = re.compile(r"CERTIFICATE_VERIFY_FAILED: (?P<why>[^:]+)")
_NAME = "Hostname Verification Check failed"
_CLOSED = ("Socket closed", "Broken pipe", "Connection reset")


def tls_fault(details: str) -> str | None:
    """The end of a sentence about the server, from the details of a call that is UNAVAILABLE; None: it is not TLS."""
    if match := _VERIFY.search(details):
        return f"its certificate is refused ({match['why']}); --tls-ca must be the CA that signed it"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS; leave --tls-ca out"
    if _NAME in details:
        return "its certificate is for another name than this address has"
    if "handshake failed" in details:
        return "TLS fails between the two"
    if _NOT_CONNECTED in details and any(each in details for each in _CLOSED):
        return "it hangs up; it may want TLS (--tls-ca), or a certificate that it trusts (--tls-cert and --tls-key)"
    return None
