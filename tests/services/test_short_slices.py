"""Short time slices: the kernel has them where it can, and nothing else of a thread changes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.short_slices import SLICE_SECONDS, ask_for_short_slices

NUMBERS = {"x86_64": 315, "aarch64": 275}
"""Of the system call sched_getattr."""


def attributes() -> tuple[int, ...]:
    """Of this thread: struct sched_attr in numbers of 32 bits."""
    numbers = (ctypes.c_uint32 * 12)()
    assert ctypes.CDLL(None).syscall(NUMBERS[platform.machine()], 0, numbers, 48, 0) == 0
    return tuple(numbers)


def has_slices() -> bool:
    """Linux 6.12 or later, on a machine that is known."""
    if sys.platform != "linux" or platform.machine() not in NUMBERS:
        return False
    return tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)


@pytest.mark.skipif(not has_slices(), reason="the kernel takes no wish for a slice")
def test_a_thread_that_asks_gets_it_and_keeps_all_else() -> None:
    def work() -> tuple[bool, tuple[int, ...], tuple[int, ...], int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        before = attributes()
        return ask_for_short_slices(), before, attributes(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = attributes()
    with ThreadPoolExecutor(1) as thread:
        taken, before, after, niceness = thread.submit(work).result()
    assert taken
    assert (after[6], after[7]) == (round(SLICE_SECONDS * 1e9), 0)
    assert before[6] > after[6]
    assert (*before[:6], *before[8:]) == (*after[:6], *after[8:])
    assert niceness == 7
    assert attributes() == mine


def test_elsewhere_it_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert not ask_for_short_slices()
