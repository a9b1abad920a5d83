"""Carries the faults out on the processes and on what is between them, and mends them again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.soak.faults import MESSAGE_FAULTS, Fault, FaultKind
from services.soak.message_faults import MessageFault
from services.soak.proof import Outage
from services.soak.proxy import FaultyProxy
from services.soak.stack import POLL_SECONDS, Child, Stack, deaf_sockets

WHOLE_SECONDS = 10.0
"""The pool of a dead runner must be whole again after so long; the machine may be busy."""


@dataclass(slots=True)
class Disturber:
    """One run's faults. proxies: each in front of the KV manager, for one runner; faults of messages meet all."""

    stack: Stack
    proxies: Sequence[FaultyProxy]
    clock: Callable[[], float]
    tell: Callable[[str], None]
    outages: list[Outage] = field(default_factory=list)
    """Runners that were dead, from the kill until they served again, or stopped."""
    found: list[str] = field(default_factory=list)
    """What was wrong on the way."""

    async def work(self, faults: tuple[Fault, ...]) -> None:
        """All faults, each at its time, or as soon as the one before is mended."""
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at - self.clock()))
            self.look_for_crashes()
            self.tell(str(fault))
            await self._disturb(fault)

    def look_for_crashes(self) -> None:
        """Notes processes that have ended although nobody killed them, and starts the KV manager again."""
        for child in (self._manager, *self.stack.runners):
            code = child.process.poll()
            if code is not None:
                self.found.append(f"{child.name} has ended by itself, with exit code {code}: {child.last_words()}")
        if self._manager.process.poll() is not None:
            self.stack.start_manager()

    async def _disturb(self, fault: Fault) -> None:
        if fault.kind in MESSAGE_FAULTS:
            await self._disturb_messages(fault)
            return
        match fault.kind:
            case FaultKind.KILL_MANAGER:
                self._manager.kill()
                await asyncio.sleep(fault.seconds)
                self.stack.start_manager()
            case FaultKind.DEAF_MANAGER:
                self._manager.kill()
                with deaf_sockets(self.stack.kv_path):
                    await asyncio.sleep(fault.seconds)
                self.stack.start_manager()
            case FaultKind.RESTART_MANAGER:
                await self._manager.stop()
                await asyncio.sleep(fault.seconds)
                self.stack.start_manager()
            case FaultKind.STOP_MANAGER:
                await _pause(self._manager, fault.seconds)
            case FaultKind.STOP_RUNNER:
                began = self.clock()
                await _pause(self.stack.runners[fault.runner], fault.seconds)
                self.outages.append(Outage(fault.runner, began, self.clock(), dead=False))
            case FaultKind.KILL_RUNNER:
                await self._kill_runner(fault)

    async def _disturb_messages(self, fault: Fault) -> None:
        self._set(MessageFault(fault.kind, fault.share))
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._set(None)

    def _set(self, fault: MessageFault | None) -> None:
        for proxy in self.proxies:
            proxy.faults.fault = fault

    async def _kill_runner(self, fault: Fault) -> None:
        began = self.clock()
        self.stack.runners[fault.runner].kill()
        await self._until_whole(fault.runner)
        await asyncio.sleep(fault.seconds)
        self.stack.start_runner(fault.runner)
        try:
            await self.stack.until_serving(fault.runner)
        finally:
            self.outages.append(Outage(fault.runner, began, self.clock()))

    async def _until_whole(self, runner: int) -> None:
        """Until nothing of a dead runner is held; while the KV manager is not there, nothing is."""
        deadline = self.clock() + WHOLE_SECONDS
        while (pool := await self.stack.pool(runner)) is not None and pool.occupancy.held_blocks:
            if self.clock() > deadline:
                held = pool.occupancy.held_blocks
                self.found.append(f"runner {runner} is dead for {WHOLE_SECONDS:g} s, and {held} blocks are still held")
                return
            await asyncio.sleep(POLL_SECONDS)

    @property
    def _manager(self) -> Child:
        assert self.stack.manager is not None
        return self.stack.manager


async def _pause(child: Child, seconds: float) -> None:
    """SIGSTOP for a while."""
    child.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        child.signal(signal.SIGCONT)
