"""The mirror against a naive KV manager: whatever is done in whatever order, both come to hold the same."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_runner.books import Admission, AllocationRequest, SequenceUpdate
from services.session.check import violations
from services.session.exchange import Exchange
from services.session.mirror import BrokenMirror, Mirror
from services.session.report import holdings
from tests.services.session.naive_manager import NaiveManager

SIZE = 4
BLOCKS = 24


class MirrorMachine(RuleBasedStateMachine):
    """Plays the engine, with physical blocks: it writes a token only where the mirror says that there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)
        self.mirror = Mirror(BLOCKS, SIZE)
        self.memory: dict[int, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.names = 0
        self.waiting: dict[int, str] = {}
        self.connect()

    def connect(self) -> None:
        """A new session with a new manager, which is told all."""
        self.mirror.silence()
        self.waiting.clear()
        self.manager = NaiveManager(BLOCKS, SIZE, 3, self.rng)
        self.manager.restore(list(holdings(self.mirror, part_bytes=64)))
        self.mirror.report()
        self.requests: deque = deque()
        self.answers: deque = deque()
        self.exchange = Exchange(1, self.requests.append)
        self.mirror.add_lease(self.manager.fill_lease())
        self.agree()

    def agree(self) -> None:
        """With nothing on its way, both hold the same."""
        told = {each.name: (each.tokens, each.blocks, each.computed) for each in self.manager.live.values()}
        known = {name: (list(held.tokens), held.blocks, held.computed) for name, held in self.mirror.live.items()}
        assert told == known
        assert sorted(self.manager.lease) == sorted(self.mirror.lease)
        assert self.manager.idle() == self.mirror.cached.blocks.keys()

    def names_of_live(self) -> list[str]:
        return sorted(self.mirror.live)

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.names_of_live()))

    # The engine.

    @rule(length=st.integers(1, 14), first=st.integers(0, 1), leaves_nothing=st.booleans())
    def admit(self, length: int, first: int, leaves_nothing: bool) -> None:
        if len(self.mirror.live) > 4:
            return
        self.names += 1
        name = str(self.names)
        prompt = [(first + position) % 3 for position in range(length)]
        self.waiting[self.mirror.admit(AllocationRequest(name, prompt, skip_cache_write=leaves_nothing))] = name
        self.tokens[name] = prompt
        self.say()
        # As the engine does: it waits for the answer, or gives up.
        if self.rng.random() < 0.8:
            self.hear_all()
        else:
            self.collect()
            for handle in list(self.waiting):
                self.mirror.withdraw(handle)
                del self.waiting[handle]

    @precondition(lambda self: self.mirror.live)
    @rule(data=st.data(), token=st.integers(0, 2))
    def step(self, data: st.DataObject, token: int) -> None:
        """One sequence computes all that it has, and draws a token; if it has the room."""
        name = self.pick(data)
        tokens, held = self.tokens[name], self.mirror.live[name]
        told = self.mirror.tell(SequenceUpdate(name, tokens[held.told :], held.computed))
        if not self.mirror.has_room(told):
            return
        first, blocks = self.mirror.show(told)
        self.tables[name][first:] = blocks
        self.copy()
        for position in range(held.computed, len(tokens)):
            self.write(name, position, tokens[position])
        self.mirror.tell(SequenceUpdate(name, (), len(tokens)))
        tokens.append(token)

    @precondition(lambda self: self.mirror.live)
    @rule(data=st.data(), guesses=st.lists(st.integers(0, 2), min_size=1, max_size=9), right=st.integers(0, 9))
    def guess(self, data: st.DataObject, guesses: list[int], right: int) -> None:
        """A sequence that may write computes its last token and guesses; some are right, and another token follows."""
        name = self.pick(data)
        tokens, held = self.tokens[name], self.mirror.live[name]
        if held.forked or held.copy_due or held.told < len(held.tokens) or held.told < len(tokens):
            return
        update = SequenceUpdate(name, guesses, held.computed)
        if not self.mirror.can_spare(update):
            return
        told = self.mirror.tell(update)
        assert self.mirror.has_room(told), "spare room is room"
        first, blocks = self.mirror.show(told)
        self.tables[name][first:] = blocks
        self.copy()
        for position, token in enumerate([*tokens[held.computed :], *guesses], held.computed):
            self.write(name, position, token)
        if data.draw(st.booleans(), label="the orders go out before the guesses are verified"):
            self.say()
        tokens += guesses[:right]
        if len(tokens) < len(held.tokens):
            self.mirror.truncate(name, len(tokens))
            del self.tables[name][-(-len(tokens) // SIZE) :]
        self.mirror.tell(SequenceUpdate(name, (), len(tokens)))
        tokens.append(guesses[0] ^ 1)

    @precondition(lambda self: self.mirror.live)
    @rule(data=st.data())
    def cut_what_must_stay(self, data: st.DataObject) -> None:
        name = self.pick(data)
        held = self.mirror.live[name]
        for num_tokens in {0, held.computed - 1, len(held.tokens) + 1} - {-1}:
            with pytest.raises(ValueError, match="can't be cut"):
                self.mirror.truncate(name, num_tokens)

    @precondition(lambda self: self.mirror.live)
    @rule(data=st.data(), children=st.integers(1, 2))
    def fork(self, data: st.DataObject, children: int) -> None:
        name = self.pick(data)
        held = self.mirror.live[name]
        if len(self.mirror.live) > 5 or held.computed != len(self.tokens[name]) - 1:
            return
        if held.told < len(held.tokens):
            with pytest.raises(ValueError, match="has told"):
                self.mirror.fork(name, ["child"])
            return
        if held.asked or held.wants:
            with pytest.raises(BrokenMirror):
                self.mirror.fork(name, ["child"])
            return
        names = [f"{name}.{self.names + index}" for index in range(1, children + 1)]
        self.names += children
        self.mirror.fork(name, names)
        for child in names:
            self.tables[child] = self.tables[name][:]
            # The last token was drawn, and is told by nobody yet.
            self.tokens[child] = [*self.tokens[name][: held.told], (self.names + 1) % 3]

    @precondition(lambda self: self.mirror.live)
    @rule(data=st.data(), preempted=st.booleans())
    def end(self, data: st.DataObject, preempted: bool) -> None:
        name = self.pick(data)
        self.mirror.end([SequenceUpdate(name, (), 0), SequenceUpdate("nobody", (), 0)], preempted=preempted)

    @rule()
    def flush(self) -> None:
        self.mirror.step()
        self.say()

    @precondition(lambda self: not self.waiting)
    @rule()
    def return_lease(self) -> None:
        self.mirror.return_lease()
        self.say()

    # The wire.

    def say(self) -> None:
        if self.mirror.has_orders:
            self.exchange.step(self.mirror, 0.0)

    @rule()
    def carry(self) -> None:
        """The manager gets a message."""
        if self.requests:
            self.answers.append(self.manager.carry_out(self.requests.popleft().step))

    @rule()
    def hear(self) -> None:
        """An answer comes."""
        if self.answers:
            for answer, _ in self.exchange.take(self.answers.popleft(), 0.0):
                self.mirror.apply(answer)
            self.collect()

    @rule()
    def hear_all(self) -> None:
        self.say()
        while self.requests or self.answers:
            self.carry()
            self.hear()
        self.agree()

    @rule()
    def break_off(self) -> None:
        """The session breaks, with all that is on its way."""
        self.collect()
        self.connect()

    def collect(self) -> None:
        for handle in list(self.waiting):
            outcome = self.mirror.outcome(handle)
            if outcome is not None:
                name = self.waiting.pop(handle)
                if isinstance(outcome, Admission):
                    self.tables[name] = list(outcome.block_ids)
                    self.copy()

    # Physics.

    def copy(self) -> None:
        for order in self.mirror.copies:
            self.memory[order.target] = self.memory[order.source][: order.num_tokens]
        self.mirror.copies = []

    def write(self, name: str, position: int, token: int) -> None:
        block = self.tables[name][position // SIZE]
        sharers = [other for other, held in self.mirror.live.items() if block in held.blocks and other != name]
        assert not sharers, f"{name} writes to a block that {sharers} hold"
        kept = self.memory.get(block, [])[: position % SIZE]
        assert len(kept) == position % SIZE, f"{name} writes behind a hole in block {block}"
        self.memory[block] = [*kept, token]

    @invariant()
    def mirror_is_sound(self) -> None:
        assert violations(self.mirror) == []

    @invariant()
    def blocks_hold_what_is_said(self) -> None:
        """What can be hit, and what sequences have computed, is really there."""
        due = {order.target for order in self.mirror.copies}
        for block, cached in self.mirror.cached.blocks.items():
            assert b"".join(token.to_bytes(4, "little") for token in self.memory[block]) == cached.tokens
        for held in self.mirror.live.values():
            for position in range(held.computed):
                block = held.blocks[position // SIZE]
                assert block in due or self.memory[block][position % SIZE] == held.tokens[position]


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
