"""A runner without an engine: a seeded script of orders, and a mirror of what it holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from octavo.kv.v1 import kv_manager_pb2 as pb

from services.columns import from_column, to_column

SIZE = 4
SPEC = pb.PoolSpec(num_blocks=41, block_size=SIZE, model_fingerprint="script")
LEASE = 4
COMMON = [[7] * 8, [7] * 4 + [8] * 6, [9] * 5]


def opening(runner_id: str = "script", pool_id: str = "", restores: bool = False, lease: int = LEASE, spec=SPEC):
    """The first message of a stream."""
    message = pb.SessionOpen(pool_id=pool_id, spec=spec, runner_id=runner_id, lease_blocks=lease, restores=restores)
    return pb.SessionRequest(open=message)


def step(epoch: int, number: int, *orders: pb.SessionOrder, returned=()) -> pb.SessionRequest:
    message = pb.SessionStep(epoch=epoch, number=number, orders=orders, returned_block_ids=to_column(returned))
    return pb.SessionRequest(step=message)


def admit(handle: int, tokens, **more) -> pb.SessionOrder:
    return pb.SessionOrder(
        admit=pb.AdmitOrder(sequence_id=f"s{handle}", handle=handle, token_ids=to_column(tokens), **more)
    )


def progress(**columns) -> pb.Progress:
    return pb.Progress(**{name: to_column(numbers) for name, numbers in columns.items()})


def orders_of(**columns) -> pb.SessionOrder:
    return pb.SessionOrder(progress=progress(**columns))


@dataclass
class Mirrored:
    """A sequence as its runner knows it. asked: the step whose answer is awaited; deaf: that answer is not for use."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    cached: int = 0
    owns_tail: bool = True
    asked: int = 0
    deaf: bool = False


@dataclass
class Row:
    """One sequence's entry of a Progress."""

    handle: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    entries: int = 0
    taken: list[int] = field(default_factory=list)
    ask: int = 0


def progress_of(rows: list[Row]) -> pb.Progress:
    return progress(
        handles=[row.handle for row in rows],
        token_counts=[len(row.tokens) for row in rows],
        computed_tokens=[row.computed for row in rows],
        table_counts=[row.entries for row in rows],
        taken_counts=[len(row.taken) for row in rows],
        asks=[row.ask for row in rows],
        token_ids=[token for row in rows for token in row.tokens],
        taken_block_ids=[block for row in rows for block in row.taken],
    )


class ScriptedRunner:
    """Makes one step after the other; what it does depends on its seed and on the answers, and on no time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.live: dict[int, Mirrored] = {}
        self.lease: list[int] = []
        self.epoch = 0
        self.number = 0
        self._begun: dict[int, list[int]] = {}
        """Prompts of admissions that are not answered yet."""
        self._next_handle = 1

    def opened(self, message: pb.SessionOpened) -> None:
        self.epoch, self.number = message.epoch, 0
        self.lease += from_column(message.lease_block_ids, "lease")

    def next_step(self) -> pb.SessionRequest:
        """A step of random orders, in the order that the contract asks for."""
        self.number += 1
        orders = []
        if rows := [row for handle in self.live for row in self._news(handle)]:
            orders.append(pb.SessionOrder(progress=progress_of(rows)))
        orders += self._forks() + self._truncates() + self._ends()
        returned = [self.lease.pop()] if self.lease and self._chance(0.1) else []
        if len(self.live) < 6 and self._chance(0.6):
            orders.append(self._admit())
        return step(self.epoch, self.number, *orders, returned=returned)

    def accept(self, answer: pb.SessionAnswer) -> None:
        """Takes the answers in order."""
        refused = {refusal.handle for refusal in answer.refusals}
        self._take_grants(answer.grants)
        for handle, each in self.live.items():
            if each.asked == answer.number:
                each.owns_tail = each.owns_tail or (handle not in refused and not each.deaf)
                each.asked, each.deaf = 0, False
        for admitted in answer.admitted:
            tokens = self._begun.pop(admitted.handle)
            blocks = list(from_column(admitted.block_ids, "blocks"))
            self.live[admitted.handle] = Mirrored(tokens, blocks, admitted.cached_tokens, admitted.cached_tokens)
        for handle in refused:
            self._begun.pop(handle, None)
        self.lease += from_column(answer.lease_block_ids, "lease")

    def holdings(self) -> pb.Holdings:
        """What the mirror says, without what is only cached."""
        sequences = [
            pb.HeldSequence(
                sequence_id=f"s{handle}",
                handle=handle,
                token_ids=to_column(each.tokens),
                block_ids=to_column(each.blocks),
                computed_tokens=each.computed,
                cached_tokens=each.cached,
            )
            for handle, each in self.live.items()
        ]
        return pb.Holdings(sequences=sequences, lease_block_ids=to_column(self.lease), last=True)

    def forget_unanswered(self) -> None:
        """After a stream that broke: asks and admissions that were not answered are void."""
        self._begun.clear()
        for each in self.live.values():
            each.asked, each.deaf = 0, False

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _news(self, handle: int) -> list[Row]:
        each = self.live[handle]
        if self._chance(0.2):
            return []
        if each.asked and (not each.owns_tail or not self.lease or self._chance(0.5)):
            return []
        row = Row(handle, computed=each.computed)
        if each.owns_tail:
            row.computed = each.computed = min(len(each.tokens), len(each.blocks) * SIZE)
            row.tokens = [self._random.randrange(3) for _ in range(self._random.randrange(4))]
            each.tokens += row.tokens
        short = len(each.tokens) - len(each.blocks) * SIZE
        if each.owns_tail and short >= 0 and self.lease and self._chance(0.5):
            row.entries, row.taken = len(each.blocks), [self.lease.pop()]
            each.blocks += row.taken
            each.deaf = bool(each.asked)
        elif not each.asked and (not each.owns_tail or short >= -1):
            row.ask, each.asked = self._random.randrange(1, 4), self.number
        return [row]

    def _take_grants(self, grants: pb.Grants) -> None:
        blocks = list(from_column(grants.block_ids, "blocks"))
        columns = [from_column(getattr(grants, name), name) for name in ("handles", "first_indices", "counts")]
        for handle, first, count in zip(*columns, strict=True):
            granted, blocks = blocks[:count], blocks[count:]
            each = self.live.get(handle)
            if each is not None and not each.deaf:
                each.blocks[first:] = granted

    def _quiet(self) -> list[int]:
        return [handle for handle, each in self.live.items() if not each.asked]

    def _forks(self) -> list[pb.SessionOrder]:
        if not self._quiet() or len(self.live) > 6 or not self._chance(0.2):
            return []
        parent = self._random.choice(self._quiet())
        each, child = self.live[parent], self._handle()
        each.owns_tail = False
        self.live[child] = Mirrored(each.tokens[:], each.blocks[:], each.computed, each.cached, owns_tail=False)
        fork = pb.ForkOrder(parent_handle=parent, child_ids=[f"s{child}"], child_handles=to_column([child]))
        return [pb.SessionOrder(fork=fork)]

    def _truncates(self) -> list[pb.SessionOrder]:
        if not self._quiet() or not self._chance(0.2):
            return []
        handle = self._random.choice(self._quiet())
        each = self.live[handle]
        kept = self._random.randrange(1, len(each.tokens) + 1)
        del each.tokens[kept:], each.blocks[-(-kept // SIZE) :]
        each.computed, each.cached, each.owns_tail = min(each.computed, kept), min(each.cached, kept), False
        return [pb.SessionOrder(truncate=pb.TruncateOrder(handle=handle, num_tokens=kept))]

    def _ends(self) -> list[pb.SessionOrder]:
        ended = [handle for handle in self.live if self._chance(0.1)]
        if not ended:
            return []
        rows = [Row(handle, computed=self.live.pop(handle).computed) for handle in ended]
        end = pb.EndOrder(progress=progress_of([*rows, Row(1 << 30)]), preempted=self._chance(0.3))
        return [pb.SessionOrder(end=end)]

    def _admit(self) -> pb.SessionOrder:
        handle = self._handle()
        tokens = self._random.choice(COMMON) + [self._random.randrange(3) for _ in range(self._random.randrange(6))]
        self._begun[handle] = list(tokens)
        return admit(handle, tokens, headroom_blocks=self._random.randrange(3))

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle
