"""Why a verb was refused: each error has a reason for programs, a sentence for people, and the numbers."""

from __future__ import annotations

from typing import ClassVar


class KvError(Exception):
    """A refused verb; nothing has changed. `reason` is UPPER_SNAKE_CASE, `numbers` are the facts of the sentence."""

    reason: ClassVar[str] = "KV_ERROR"

    def __init__(self, sentence: str, **numbers: object) -> None:
        super().__init__(sentence)
        self.numbers = {key: str(value) for key, value in numbers.items()}


class InvalidArgument(KvError):
    """The request makes no sense, whatever the state of the pool."""

    reason: ClassVar[str] = "INVALID_ARGUMENT"


class NeverFits(InvalidArgument):
    """No pool of this size can ever hold the sequence."""

    reason: ClassVar[str] = "NEVER_FITS"


class PoolShort(KvError):
    """Too few blocks are free or cached at this moment."""

    reason: ClassVar[str] = "POOL_SHORT"


class QuotaShort(PoolShort):
    """The pool may have room, but the quota of the sequence's salt leaves too little at this moment."""

    reason = "QUOTA_SHORT"


class PinsExhausted(KvError):
    """As much of the pool is pinned as may be; a verb that pins nothing more may still succeed."""

    reason: ClassVar[str] = "PINS_EXHAUSTED"


class UnknownPool(KvError):
    """No such pool is open."""

    reason: ClassVar[str] = "UNKNOWN_POOL"


class UnknownSequence(KvError):
    """No such sequence is live."""

    reason: ClassVar[str] = "UNKNOWN_SEQUENCE"


class SequenceExists(KvError):
    """A live sequence has the id already."""

    reason: ClassVar[str] = "SEQUENCE_EXISTS"


class PoolDiffers(KvError):
    """The pool is open with other facts."""

    reason: ClassVar[str] = "POOL_DIFFERS"


class SessionTaken(KvError):
    """Another opening of the pool has ended the session."""

    reason: ClassVar[str] = "STALE_EPOCH"


class SessionSilent(KvError):
    """Nothing was heard of the runner for too long."""

    reason: ClassVar[str] = "SESSION_SILENT"


class KvManagerStopping(KvError):
    """The process ends; another one may follow."""

    reason: ClassVar[str] = "STOPPING"


class StaleEpoch(KvError):
    """The caller speaks for an opening of the pool that is over."""

    reason: ClassVar[str] = "STALE_EPOCH"


class NotOwner(KvError):
    """The sequence belongs to a runner, and the caller does not speak for it."""

    reason: ClassVar[str] = "NOT_OWNER"


class PoolBusy(KvError):
    """The verb needs a pool without live sequences."""

    reason: ClassVar[str] = "POOL_BUSY"


class BrokenBooks(KvError):
    """The books contradict themselves: a fault of the KV manager, never of a caller."""

    reason: ClassVar[str] = "BROKEN_BOOKS"
