"""Tokenising beside the event loop: short texts in threads, long ones one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Tokens = TypeVar("Tokens")

LONG_TEXT = 16_384
"""Characters from which on texts are tokenised one at a time: at once they would take every core from the model."""


class TextThreads:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-long-texts")

    async def tokenised(self, size: int, work: Callable[[], Tokens]) -> Tokens:
        """Tokenises `size` characters in another thread; long texts wait for each other, short ones for none."""
        threads = self._long_texts if size >= LONG_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)
