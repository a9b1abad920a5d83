"""One soak: the undisturbed run, the load with its faults, the end of all streams, and the proof."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from services.client import AsyncClient
from services.errors import StartupError
from services.soak.disturber import Disturber
from services.soak.faults import Fault, fault_schedule
from services.soak.load import MAX_TOKENS, PROMPTS, SEARCH_TOKENS, SEARCH_WIDTH
from services.soak.message_faults import MessageFaults
from services.soak.proof import Answer, PoolEnd, Truth, count_ends, faults_of, pool_faults
from services.soak.proxy import FaultyProxy
from services.soak.stack import POLL_SECONDS, RunnerPlace, Stack
from services.soak.users import Users

BY_SOCKET = (True, False)
"""Of the runners: whether its sessions go over the socket for them, or over gRPC. Each has a proxy of its own."""
RUNNERS = len(BY_SOCKET)
END_SECONDS = 120.0
"""After the load, before a stream counts as one that hangs."""
SETTLE_SECONDS = 30.0
"""For the last frees to arrive, once all streams have ended."""
NARROW = 0.001
"""In nats: closer candidates may change places by the order of a sum."""
COUNTS = {
    "preemptions": "octavo_runner_preemptions_total",
    "restores": "octavo_kv_session_restores_total",
    "resends": "octavo_kv_session_resends_total",
    "blocks of the lease taken": "octavo_kv_lease_taken_blocks_total",
}
"""What runners count, and the names of their metrics for it."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds of load, with so many users for each runner."""

    seed: int
    seconds: float
    users: int = 6

    def faults(self) -> tuple[Fault, ...]:
        """What will go wrong."""
        return fault_schedule(self.seed, self.seconds, RUNNERS)


@dataclass(frozen=True, slots=True)
class Report:
    """found: what was wrong, a sentence each. ends: requests by how they ended. hits: disturbed messages by what
    happened to them, and by the way. counts: what the runners count, by name, since each was started last.
    """

    found: tuple[str, ...]
    ends: Mapping[str, int]
    hits: Mapping[str, int]
    counts: Mapping[str, int]
    tokens: int


async def soak(plan: Plan, directory: Path, tell: Tell) -> Report:
    """Runs it all with processes whose files are in `directory`. Raises StartupError when they don't start at all."""
    addresses = [f"unix:{directory}/proxy-{number}.sock" for number in range(RUNNERS)]
    stack = Stack(directory, addresses)
    proxies = [
        FaultyProxy(address, stack.kv_address, MessageFaults(Random(f"messages {plan.seed} {number}")), by_socket=way)
        for number, (address, way) in enumerate(zip(addresses, BY_SOCKET, strict=True))
    ]
    async with AsyncExitStack() as cleanup:
        for proxy in proxies:
            cleanup.push_async_callback(proxy.stop)
        cleanup.push_async_callback(stack.stop)
        for proxy in proxies:
            await proxy.start()
        stack.start_manager()
        for number in range(RUNNERS):
            stack.start_runner(number)
        for number in range(RUNNERS):
            await stack.until_serving(number)
        tell("undisturbed run")
        # The last pool has room for many answers at a time.
        truth = await _truth(stack.places[-1])
        run = _Run(plan, stack, proxies, truth, tell)
        return await run.work()


class _Run:
    """From the beginning of the load to the report."""

    def __init__(self, plan: Plan, stack: Stack, proxies: Sequence[FaultyProxy], truth: Truth, tell: Tell) -> None:
        self._plan = plan
        self._stack = stack
        self._proxies = proxies
        self._truth = truth
        self._tell = tell
        began = time.monotonic()
        self._clock = lambda: time.monotonic() - began
        self._users = Users(plan.seed, self._clock)
        self._disturber = Disturber(stack, proxies, self._clock, tell)
        self._counts: Counter[str] = Counter()

    async def work(self) -> Report:
        """The load under faults, and the proof."""
        ticker = asyncio.create_task(self._tick())
        try:
            await self._disturb()
        except StartupError as error:
            self._disturber.found.append(str(error))
        finally:
            ticker.cancel()
        outcomes = self._users.outcomes
        found = faults_of(outcomes, self._truth, self._disturber.outages) + self._disturber.found
        self._tell("the proof")
        for faults in await asyncio.gather(*(self._look_at(number) for number in range(RUNNERS))):
            found += faults
        return Report(
            tuple(found),
            count_ends(outcomes),
            self._hits(),
            self._counts,
            sum(outcome.num_tokens for outcome in outcomes),
        )

    async def _disturb(self) -> None:
        """The load and the faults, until all streams have ended or have to be given up."""
        users = [
            asyncio.create_task(self._users.work(user, number, place.address, self._plan.seconds))
            for number, place in enumerate(self._stack.places)
            for user in range(self._plan.users)
        ]
        try:
            await self._disturber.work(self._plan.faults())
            self._disturber.look_for_crashes()
            await asyncio.wait(users, timeout=self._plan.seconds - self._clock() + END_SECONDS)
        finally:
            for user in users:
                user.cancel()
        ended = await asyncio.gather(*users, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _look_at(self, number: int) -> list[str]:
        """What is wrong with a runner and its pool at the end."""
        try:
            await self._stack.until_serving(number)
        except StartupError as error:
            return [str(error)]
        end = await self._pool_end(number)
        deadline = self._clock() + SETTLE_SECONDS
        while pool_faults(end) and self._clock() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            end = await self._pool_end(number)
        found = pool_faults(end)
        samples = await asyncio.to_thread(_samples, self._stack.places[number])
        self._counts.update({name: int(samples[metric]) for name, metric in COUNTS.items()})
        again = await _truth(self._stack.places[number])
        for prompt, (now, then) in enumerate(zip(again.answers, self._truth.answers, strict=True)):
            if now.tokens[: then.sure] != then.tokens[: then.sure]:
                found.append(f"runner {number} answers prompt {prompt} in another way than before the faults")
        for prompt, (now, then) in enumerate(zip(again.searches, self._truth.searches, strict=True)):
            if now != then:
                found.append(f"runner {number} searches from prompt {prompt} in another way than before the faults")
        return found

    async def _pool_end(self, number: int) -> PoolEnd:
        place = self._stack.places[number]
        pool = await self._stack.pool(number)
        if pool is None:
            return PoolEnd(place.pool, 0, 0, 0, 0, 0, 0, 0, 0, ("the KV manager does not know it",))
        violations = await self._stack.check(number)
        async with AsyncClient(place.address) as client:
            requests = len(await client.requests())
        occupancy = pool.occupancy
        return PoolEnd(
            place.pool,
            usable=occupancy.usable_blocks,
            free=occupancy.free_blocks,
            cached=occupancy.cached_blocks,
            held=occupancy.held_blocks,
            leased=occupancy.leased_blocks,
            sequences=occupancy.sequences,
            requests=requests,
            runner_lease=int((await asyncio.to_thread(_samples, place))["octavo_kv_lease_blocks"]),
            violations=violations,
        )

    def _hits(self) -> dict[str, int]:
        """Disturbed messages, by the way and by what happened to them."""
        ways = zip(BY_SOCKET, self._proxies, strict=True)
        return {
            f"{kind.value} ({'socket' if by_socket else 'gRPC'})": count
            for by_socket, proxy in ways
            for kind, count in proxy.faults.hits.items()
        }

    async def _tick(self) -> None:
        """A line a second."""
        while True:
            await asyncio.sleep(1.0)
            outcomes = self._users.outcomes
            ends = Counter(outcome.code or "ended" for outcome in outcomes if outcome.ended is not None)
            open_streams = sum(outcome.ended is None for outcome in outcomes)
            tokens = sum(outcome.num_tokens for outcome in outcomes)
            told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
            self._tell(f"{open_streams} streams open; {told}; {tokens} tokens")


async def _truth(place: RunnerPlace) -> Truth:
    """What a runner answers to all prompts while nothing disturbs it."""
    async with AsyncClient(place.address) as client:
        answers = await asyncio.gather(*(_answer(client, prompt) for prompt in PROMPTS))
        if not (await client.model()).deterministic:
            return Truth(answers)
        return Truth(answers, await asyncio.gather(*(_search(client, prompt) for prompt in PROMPTS)))


async def _search(client: AsyncClient, prompt: str) -> tuple[tuple[int, ...], ...]:
    beams: list[list[int]] = [[] for _ in range(SEARCH_WIDTH)]
    answer = client.generate(prompt, max_tokens=SEARCH_TOKENS, ignore_eos=True, n=SEARCH_WIDTH, beam_width=SEARCH_WIDTH)
    async for chunk in answer:
        beams[chunk.choice_index] += chunk.token_ids
    return tuple(map(tuple, beams))


async def _answer(client: AsyncClient, prompt: str) -> Answer:
    tokens: list[int] = []
    sure: int | None = None
    async for chunk in client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2):
        tokens += chunk.token_ids
        for place, position in enumerate(chunk.logprobs, len(tokens) - len(chunk.token_ids)):
            if sure is None and position.top[0][1] - position.top[1][1] < NARROW:
                sure = place
    return Answer(tuple(tokens), len(tokens) if sure is None else sure)


def _samples(place: RunnerPlace) -> dict[str, float]:
    """A runner's metrics, as far as they have no labels."""
    with urllib.request.urlopen(f"http://{place.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split(" ") for line in lines if line[:1] != "#" and "{" not in line)
    return {name: float(value) for name, value in pairs}
