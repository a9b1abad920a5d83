"""Everything that moves a metric, at once, on a pool that is too small for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import grpc
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.client import OctavoError
from tests.e2e.stack import Stack

RUNNER_ARGUMENTS = ("--num-blocks", "65", "--lease-blocks", "4", "--speculative-tokens", "2")
"""64 blocks of 16 tokens; a prompt and its answer take 10 to 20 of them."""

Work = Callable[[Stack, int], None]


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Tokens below 256; those of one seed are always the same."""
    return [(seed * 31 + place * 7) % 250 for place in range(num_tokens)]


def answers(stack: Stack, turn: int) -> None:
    """Eight prompts in turn, more than the pool can cache, of two tenants and of nobody."""
    seed = turn % 8
    with stack.client() as client:
        options = {"max_tokens": 120, "ignore_eos": True, "tenant": ("acme", "globex", "")[turn % 3]}
        list(client.generate(prompt(seed, 100 + 16 * seed), **options))


def forks(stack: Stack, turn: int) -> None:
    with stack.client() as client:
        list(client.generate(prompt(50, 60), n=3, temperature=1.0, seed=turn, max_tokens=20, ignore_eos=True))


def beams(stack: Stack, turn: int) -> None:
    with stack.client() as client:
        list(client.generate(prompt(60, 40), beam_width=3, n=2, max_tokens=12))


def repeated(stack: Stack, turn: int) -> None:
    """An answer that repeats its prompt, so that guesses are made."""
    with stack.client() as client:
        list(client.generate([5, 6, 7, 8] * 8, max_tokens=40, ignore_eos=True))


def aborts(stack: Stack, turn: int) -> None:
    with stack.client() as client:
        stream = client.generate(prompt(70 + turn, 20), max_tokens=300, ignore_eos=True)
        next(stream)
        stream.close()


def refused(stack: Stack, turn: int) -> None:
    """A prompt that can't be, a verb that its client makes wrong, and a sequence that nobody knows."""
    with stack.client() as client, suppress(OctavoError):
        list(client.generate([], max_tokens=1))
    with stack.kv() as stub:
        with suppress(grpc.RpcError):
            stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id="nobody"), timeout=60)
        stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="nobody")]), timeout=60)


def operators(stack: Stack, turn: int) -> None:
    """What people ask; a salt that has a quota of two blocks; pins, and prefixes that are taken back."""
    with stack.kv() as stub:
        stub.GetPool(pb.GetPoolRequest(), timeout=60)
        stub.Check(pb.CheckRequest(), timeout=60)
        stub.SetQuota(pb.SetQuotaRequest(salt="small", max_blocks=2), timeout=60)
        with suppress(grpc.RpcError):
            request = pb.AllocateRequest(
                sequence_id=f"first-{turn}", token_ids=prompt(90, 20), scope=pb.CacheScope(salt="small")
            )
            stub.Allocate(request, timeout=60)
            request.sequence_id = f"second-{turn}"
            stub.Allocate(request, timeout=60)
        frees = [pb.SequenceAppend(sequence_id=f"first-{turn}")]
        stub.Free(pb.FreeRequest(sequences=frees), timeout=60)
        pinned = prompt(80, 32)
        with suppress(grpc.RpcError):
            request = pb.AllocateRequest(
                sequence_id=f"pin-{turn}", token_ids=pinned, retention=pb.Retention(pin_seconds=3)
            )
            stub.Allocate(request, timeout=60)
            ended = [pb.SequenceAppend(sequence_id=f"pin-{turn}", computed_tokens=32)]
            stub.Free(pb.FreeRequest(sequences=ended), timeout=60)
        if turn % 4 == 3:
            stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=pinned), timeout=60)


WORKERS: tuple[tuple[Work, int], ...] = (
    (answers, 5),
    (forks, 1),
    (beams, 1),
    (repeated, 1),
    (aborts, 1),
    (refused, 1),
    (operators, 1),
)
"""What is done over and over, and by how many at a time."""


class Load:
    """Users that go on until they are told to stop; what one of them meets is raised at the end."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stopped = threading.Event()
        self.began = time.time()
        workers = [(work, start, number) for work, number in WORKERS for start in range(number)]
        self._pool = ThreadPoolExecutor(len(workers))
        self._done = [self._pool.submit(self._work, *worker) for worker in workers]

    def _work(self, work: Work, start: int, step: int) -> None:
        for turn in count(start, step):
            if self._stopped.is_set():
                return
            work(self._stack, turn)
            time.sleep(0.02)

    def alive(self) -> bool:
        """Raises what a user met, if one has ended."""
        for each in self._done:
            if each.done():
                each.result()
        return True

    def stop(self) -> None:
        self._stopped.set()
        for each in self._done:
            each.result()
        self._pool.shutdown()
