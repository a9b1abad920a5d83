"""The users: each makes his requests one after the other, and notes what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from model_runner.request import Chunk
from services.client import AsyncClient, OctavoError
from services.soak.load import PROMPTS, SEARCH_WIDTH, Ending, Kind, Request, requests_of
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
    async with AsyncClient(address, timeout=request.seconds or None) as client, AsyncExitStack() as cleanup:
        if request.patience and request.ending is Ending.ABORT:
            aborting = asyncio.create_task(_abort(client, request))
            cleanup.callback(aborting.cancel)
        try:
            # The end of a patience that is over drops the stream.
            async with asyncio.timeout(
                request.patience if request.ending is Ending.DROP and request.patience else None
            ):
                await _follow(outcome, client)
        except TimeoutError:
            # Out of patience: the stream is dropped.
            return
        except OctavoError as error:
            outcome.code, outcome.reason, outcome.sentence = error.code, error.reason, error.sentence


async def _follow(outcome: Outcome, client: AsyncClient) -> None:
    """Reads a stream to its end, or as many tokens as its user wants to have."""
    request = outcome.request
    aborted = False
    async for chunk in _answer(request, client):
        outcome.take(chunk)
        if not request.after or outcome.num_tokens < request.after:
            continue
        if request.ending is Ending.DROP:
            return
        if request.ending is Ending.ABORT and not aborted:
            aborted = True
            await _abort(client, request)


def _answer(request: Request, client: AsyncClient) -> AsyncIterator[Chunk]:
    return client.generate(
        PROMPTS[request.prompt],
        max_tokens=request.max_tokens,
        ignore_eos=True,
        n=request.choices,
        best_of=request.drawn or None,
        beam_width=SEARCH_WIDTH if request.kind is Kind.BEAMS else None,
        request_id=request.name,
        cache_salt=request.salt,
        priority=request.priority,
    )


async def _abort(client: AsyncClient, request: Request) -> None:
    """Aborts a request, of one whose answers come at the end after a while."""
    await asyncio.sleep(request.patience)
    with suppress(OctavoError):
        await client.abort(request.name)
