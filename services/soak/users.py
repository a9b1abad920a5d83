"""The users: each makes his requests one after the other, and notes what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from services.client import AsyncClient, OctavoError
from services.soak.load import PROMPTS, Ending, requests_of
from services.soak.proof import Outcome

BETWEEN_ERRORS_SECONDS = 0.5
"""A user whose runner is not there waits so long before he goes on."""


@dataclass(slots=True)
class Users:
    """Those of all runners. clock: seconds since the load began."""

    seed: int
    clock: Callable[[], float]
    outcomes: list[Outcome] = field(default_factory=list)
    """Of all requests that were begun, in order."""

    async def work(self, user: int, runner: int, address: str, until: float) -> None:
        """What one user does until a moment of the clock; a request that is open then is still seen to its end."""
        for request in requests_of(self.seed, f"r{runner}u{user}"):
            await asyncio.sleep(request.pause)
            if self.clock() >= until:
                return
            outcome = Outcome(request, runner, self.clock())
            self.outcomes.append(outcome)
            await _make(outcome, address)
            outcome.ended = self.clock()
            if outcome.code:
                await asyncio.sleep(BETWEEN_ERRORS_SECONDS)


async def _make(outcome: Outcome, address: str) -> None:
    """Makes a request and follows its stream as far as its user wants to."""
    request = outcome.request
    aborted = False
    async with AsyncClient(address, timeout=request.seconds or None) as client:
        answer = client.generate(
            PROMPTS[request.prompt],
            max_tokens=request.max_tokens,
            ignore_eos=True,
            n=request.choices,
            request_id=request.name,
            cache_salt=request.salt,
            priority=request.priority,
        )
        try:
            async for chunk in answer:
                outcome.take(chunk)
                if outcome.num_tokens < request.after or request.ending is Ending.COMPLETE:
                    continue
                if request.ending is Ending.DROP:
                    return
                if request.ending is Ending.ABORT and not aborted:
                    aborted = True
                    with suppress(OctavoError):
                        await client.abort(request.name)
        except OctavoError as error:
            outcome.code, outcome.reason, outcome.sentence = error.code, error.reason, error.sentence
