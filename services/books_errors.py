"""What the engine's books raise beyond the port's own exceptions."""

from __future__ import annotations


class BooksRefused(RuntimeError):
    """The KV manager refused a verb for a reason that only a fault of the engine or a wrong setting can have.

    The message is the KV manager's sentence; `reason` its UPPER_SNAKE_CASE reason, empty when it sent none.
    """

    def __init__(self, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason
