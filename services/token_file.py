"""The file of bearer tokens, read again when it changes; only SHA-256 of the tokens stays in memory.

    salt_secret: some-long-secret        # optional: salts are derived from it
    tokens:
      - tenant: acme
        token: 1f0c...                   # or token_sha256: of the token's bytes, in hexadecimal
        salt: ...                        # optional: the cache salt itself

A bare list of such entries will do. A tenant may have several tokens, and has one salt: the one given, or HMAC-SHA256
of its name by `salt_secret`, or by a secret that is made up for the process and ends with it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from model_runner.request import MAX_SALT_BYTES
from services.callers import Caller
from services.config_yaml import line_of
from services.errors import StartupError
from services.watched_files import FileWatch

log = structlog.get_logger()


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # Short enough for a digest behind it, as a request's name.
    tenant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,62}$")
    # What may stand in a header.
    token: str | None = Field(None, min_length=16, max_length=1024, pattern=r"^[\x21-\x7e]+$")
    token_sha256: str | None = Field(None, pattern=r"^[0-9A-Fa-f]{64}$")
    salt: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check(self) -> _Entry:
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("give either token or token_sha256")
        if self.salt is not None and len(self.salt.encode()) > MAX_SALT_BYTES:
            raise ValueError(f"the salt has more than {MAX_SALT_BYTES} bytes")
        return self

    def digest(self) -> bytes:
        if self.token is not None:
            return digest_of(self.token)
        return bytes.fromhex(self.token_sha256 or "")


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    salt_secret: str | None = Field(None, min_length=16)
    tokens: tuple[_Entry, ...] = Field(min_length=1)


class BadTokenFile(Exception):
    """The file cannot be taken; the sentence has nothing of what it holds but names of tenants."""


def digest_of(token: str) -> bytes:
    """SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


class TokenFile:
    """The tokens of a file, as it is now. Belongs to one thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartupError for a file that cannot be taken."""
        self._path = path
        self._process_secret = secrets.token_bytes(32)
        self._watch = FileWatch([path], clock)
        try:
            self._callers = self._read()
        except BadTokenFile as error:
            raise StartupError(f"--auth-tokens: {error}") from None

    def caller(self, token: str) -> Caller | None:
        """Whose the token is; None when it is nobody's."""
        self._refresh()
        return _find(self._callers, digest_of(token))

    def caller_of(self, tenant: str) -> Caller | None:
        """A tenant as its tokens have it; None for one that has none."""
        self._refresh()
        return next((caller for caller in self._callers.values() if caller.tenant == tenant), None)

    def _refresh(self) -> None:
        """Takes a file that has changed. One that cannot be taken leaves everything as it was, and is logged once."""
        if not self._watch.changed():
            return
        try:
            self._callers = self._read()
        except BadTokenFile as error:
            log.warning("the tokens stay as they were", reason=str(error))
        else:
            log.info("tokens read again", path=str(self._path), tokens=len(self._callers))

    def _read(self) -> dict[bytes, Caller]:
        content = _parse(self._path)
        key = content.salt_secret.encode() if content.salt_secret else self._process_secret
        return _callers(self._path, content.tokens, key)


def _find(callers: Mapping[bytes, Caller], digest: bytes) -> Caller | None:
    """Compares with all of them, so that the time it takes says nothing of how near a wrong one is."""
    found = None
    for known, caller in callers.items():
        if hmac.compare_digest(known, digest):
            found = caller
    return found


def _parse(path: Path) -> _Content:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadTokenFile(f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadTokenFile(f"{path} is no valid YAML{line_of(error)}.") from None
    try:
        return _Content.model_validate({"tokens": loaded} if isinstance(loaded, list) else loaded)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise BadTokenFile(f"{path} cannot be taken, at {place}: {message[:1].lower()}{message[1:]}.") from None


def _callers(path: Path, entries: Sequence[_Entry], key: bytes) -> dict[bytes, Caller]:
    """The caller of each token, by its digest."""
    salts = {entry.tenant: entry.salt for entry in entries if entry.salt is not None}
    callers: dict[bytes, Caller] = {}
    for entry in entries:
        if entry.salt is not None and entry.salt != salts[entry.tenant]:
            raise BadTokenFile(f"{path} gives tenant {entry.tenant!r} two salts; a tenant has one.")
        digest, caller = entry.digest(), Caller(entry.tenant, salts.get(entry.tenant) or _salt(key, entry.tenant))
        if digest in callers and callers[digest] != caller:
            raise BadTokenFile(f"{path} gives one token to {callers[digest].tenant!r} and {entry.tenant!r}.")
        callers[digest] = caller
    return callers


def _salt(key: bytes, tenant: str) -> str:
    return hmac.new(key, tenant.encode(), hashlib.sha256).hexdigest()
