"""The mirror: what one runner holds in its pool, kept by its engine's thread, and what to say of it.

The verbs of the engine change the mirror at once and leave orders for the next message; an answer changes it again.
What the mirror says is the truth of the physical cache, so that the books of a KV manager that has lost them, or has
missed something, can be made anew from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from octavo.kv.v1 import kv_manager_pb2 as pb

from model_runner.books import POOL_SHORT, Admission, AllocationRequest, CopyOrder, SequenceUpdate
from services.columns import from_column, to_column
from services.session.foresight import Foresight
from services.session.held import Held, Refused
from services.session.holding import Holding
from services.session.orders import OrderBook, Outgoing
from services.session.spares import Spares
from services.session.tap import Glance, SequenceTap
from services.session.turned_away import TurnedAway


class BrokenMirror(Exception):
    """The KV manager's books are not what this runner holds: they must be made anew from its report."""


class Mirror(Holding):
    """A holding, and the orders and answers that change it at both ends. Not thread-safe.

    `speaks` is true from a report on until the session that it was for breaks: only then are orders kept, since a
    report says all that came before.
    """

    def __init__(self, num_blocks: int, block_size: int, *, lease_blocks: int = 0, caches: bool = True) -> None:
        """lease_blocks: spare ones, at most."""
        super().__init__(num_blocks, block_size, caches=caches)
        self.copies: list[CopyOrder] = []
        """Copies that the engine has not been told of yet, in order."""
        self.orders = OrderBook()
        self.speaks = False
        self.tap: SequenceTap | None = None
        """Is told the tokens of every sequence, before the KV manager is."""
        self.spares = Spares(lease_blocks, num_blocks - 1, block_size)
        self._turned_away = TurnedAway(num_blocks - 1, block_size)
        self._returned: list[int] = []
        self._handles = 0
        self._admitting: dict[int, Held] = {}
        self._results: dict[int, Admission | Refused] = {}
        self._asked: dict[int, list[Held]] = {}
        """By message, the sequences that ask for room in it."""
        self._foresight = Foresight(block_size)

    # The engine's verbs.

    def tell(self, update: SequenceUpdate) -> Held:
        """Notes the news of a live sequence. Told again, they change nothing.

        Raises ValueError, and changes nothing, for an unknown sequence and for news that can't be true.
        """
        held = self.held(update.sequence_id)
        fresh = update.token_ids[len(held.tokens) - held.told :]
        room = min(len(held.tokens) + len(fresh), len(held.blocks) * self.block_size)
        if update.computed_tokens > room:
            raise ValueError(f"{held.sequence_id!r} can't have {update.computed_tokens} computed tokens of {room}")
        if self.tap is not None and fresh:
            self.tap.tell(held.handle, len(held.tokens), array("I", fresh))
        held.tokens.extend(fresh)
        held.ahead = update.ahead
        held.computed = max(held.computed, update.computed_tokens)
        if held.computed >= held.promised:
            held.promised = 0
        if self.speaks and (held.sent < len(held.tokens) or held.sent_computed < held.computed):
            self.orders.tell(held)
        return held

    def has_room(self, held: Held) -> bool:
        """Whether the sequence may write up to its last token; takes blocks of the lease, or else asks for room.

        The last token is the last one ahead, should there be any.
        """
        if held.copy_due:
            return False
        num_tokens = len(held.tokens) + held.ahead
        if held.forked and self.is_shared(held):
            self._ask(held, num_tokens)
            held.copy_due = held.wants > 0
            return False
        held.forked = False
        missing = self.blocks_for(num_tokens) - len(held.blocks)
        if missing > len(self.lease):
            self._ask(held, num_tokens)
            return False
        if missing > 0:
            self._take(held, missing)
        return True

    def show(self, held: Held) -> tuple[int, list[int]]:
        """What the engine has not seen of the block table, and the index of its first entry.

        The engine goes on with the sequence: what it told counts as told, and room is asked for ahead of its next need.
        """
        first, held.shown = held.shown, len(held.blocks)
        held.told = len(held.tokens)
        self._foresight.plan(held)
        return first, held.blocks[first:]

    def can_spare(self, update: SequenceUpdate) -> bool:
        """Whether the news of a sequence fit into its blocks, and half of the lease: the rest is for who must go on."""
        held = self.held(update.sequence_id)
        num_tokens = held.told + len(update.token_ids)
        missing = self.blocks_for(num_tokens) - len(held.blocks)
        if missing > 0:
            self.spares.note_guess()
        return not held.copy_due and not held.forked and missing <= len(self.lease) // 2

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Takes back what was told of a sequence behind its first `num_tokens` tokens, with the blocks for it.

        Raises ValueError, and changes nothing, for an unknown sequence, for computed tokens, and for more than it has.
        """
        held = self.held(sequence_id)
        if not max(1, held.computed) <= num_tokens <= len(held.tokens):
            raise ValueError(f"{sequence_id!r} can't be cut to {num_tokens} tokens: {held.computed} are computed")
        if self.tap is not None:
            self.tap.cut(held.handle, num_tokens)
        num_blocks = min(len(held.blocks), self.blocks_for(num_tokens))
        held.shown = min(held.shown, num_blocks)
        if self.speaks and held.sent <= num_tokens and not held.taken:
            # Nobody was told of it: the blocks are there for what comes next.
            held.cut_tokens(num_tokens)
        else:
            if self.speaks:
                self.orders.truncate(held, num_tokens)
            held.cut_tokens(num_tokens)
            self.cut(held, num_blocks)
        self._foresight.plan(held)

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Gives children the parent's tokens and blocks.

        Raises BrokenMirror while an answer may change them; ValueError for an unknown parent, and for one that has told
        tokens without getting the room for them.
        """
        parent = self.held(parent_id)
        if parent.told < len(parent.tokens):
            raise ValueError(f"{parent_id!r} has told {len(parent.tokens)} tokens, and has room for {parent.told}")
        if parent.asked or parent.wants:
            raise BrokenMirror(f"sequence {parent_id!r} was forked while it asked for room")
        parent.forked = True
        children = [parent.child(child_id, self._next_handle()) for child_id in child_ids]
        if self.speaks:
            self.orders.fork(parent, children)
        for child in children:
            if self.tap is not None:
                self.tap.begin(child.handle, child.salt, child.tokens)
            self.enter(child)

    def end(self, updates: Iterable[SequenceUpdate], *, preempted: bool) -> None:
        """Ends sequences with their last news; unknown ones are ignored."""
        ended = [self.tell(update) for update in updates if update.sequence_id in self.live]
        for held in ended:
            held.wants = 0
        if self.speaks and ended:
            self.orders.end(ended, preempted)
        for held in ended:
            self._untap([held])
            self.spares.note_end(held)
            self.leave(held)

    def is_hopeless(self, request: AllocationRequest) -> bool:
        """Whether an admission was refused for want of blocks, and would be again."""
        hopeless = self._turned_away.is_hopeless(request, self.live.values(), self.held_blocks)
        if hopeless:
            self.spares.note_refusal()
        return hopeless

    def admit(self, request: AllocationRequest) -> int:
        """Asks for a new sequence and returns the handle to get the outcome by."""
        handle = self._next_handle()
        held = Held(request.sequence_id, handle, request.cache_salt, request.retention, array("I", request.token_ids))
        held.promised = request.promised_tokens
        held.forks_often = request.forks_often
        held.skips_cache_write = request.skip_cache_write
        self._admitting[handle] = held
        if self.tap is not None:
            self.tap.begin(handle, held.salt, held.tokens)
        self.orders.admit(handle, request)
        return handle

    def outcome(self, handle: int) -> Admission | Refused | None:
        """What came of an admission; None while nothing has."""
        return self._results.pop(handle, None)

    def withdraw(self, handle: int) -> None:
        """Nobody waits for this admission any more: if it succeeds, the sequence ends at once."""
        held = self._admitting.pop(handle, None)
        if held is None:
            return
        self._untap([held])
        if self.speaks:
            held.mark_sent()
            self.orders.end([held], False)

    def return_lease(self) -> bool:
        """Gives spare blocks back before the next message's orders, all that nobody is about to take.

        False when there are none.
        """
        self._give_back(self.spares.spoken_for)
        return bool(self._returned)

    def step(self, *, asks: bool = True, prompt: bool = False) -> None:
        """A step of the engine is scheduled: asks for the room that sequences will need soon, if it is time to.

        Spare blocks that are not wanted any more go back. prompt: answers come within a step.
        """
        self.spares.step(len(self.live), self.forking, self.held_blocks, prompt=prompt)
        self._give_back(self.spares.wanted)
        self._foresight.asks_late = prompt and self.spares.is_thrifty
        for held in self._foresight.step():
            if self.by_handle.get(held.handle) is not held:
                continue
            if held.computed // self.block_size < held.promised // self.block_size:
                # The step that computes these blocks is not known to be done, and nothing may be said before.
                self._foresight.plan(held)
            elif asks:
                self._ask(held, len(held.blocks) * self.block_size + 1)

    # Messages.

    def report(self) -> None:
        """All that came before is in a report, which is made next; from now on orders are kept."""
        self._forget_questions()
        self.orders.clear()
        self._returned = []
        for held in self.live.values():
            held.mark_sent()
        self.speaks = True

    def silence(self) -> None:
        """The session is broken: its answers will not come."""
        self._forget_questions()
        self.orders.clear()
        self._returned = []
        self.speaks = False

    def take_orders(self, number: int) -> Outgoing:
        """What message `number` says."""
        orders, askers = self.orders.take()
        returned, self._returned = self._returned, []
        for held in askers:
            held.asked = number
        if askers:
            self._asked[number] = askers
        self.spares.told = self.spares.wanted
        return Outgoing(orders, to_column(returned), self.spares.wanted, askers)

    def glance(self) -> Glance:
        """What is held, as another thread sees it: each part is of one moment, and not all of the same."""
        # Admissions first: one that becomes live meanwhile is seen twice rather than never.
        sequences = [*self._admitting.copy().values(), *self.live.copy().values()]
        return Glance(
            [(each.handle, each.salt, each.tokens[:], each.blocks[:]) for each in sequences], self.cached.blocks.copy()
        )

    @property
    def is_time_to_speak(self) -> bool:
        """Whether this step should say what there is to say; what was computed can wait for the next one."""
        idle_return = bool(self._returned) and not self.live
        return self.orders.presses or self._foresight.is_pace or self.spares.press or idle_return

    @property
    def has_orders(self) -> bool:
        return not self.orders.empty or bool(self._returned) or self.spares.press

    def apply(self, answer: pb.SessionAnswer) -> None:
        """Takes over the answer to a message; they must come in order. Raises BrokenMirror."""
        self.cached.discard_all(_ids(answer.forgotten_block_ids))
        self.add_lease(answer.lease_block_ids)
        asked = {held.handle: held for held in self._asked.pop(answer.number, ())}
        # Who has been served otherwise since, or cut, has no use for the answer.
        askers = {handle: held for handle, held in asked.items() if held.asked == answer.number}
        self._apply_grants(answer.grants, askers)
        for admitted in answer.admitted:
            self._apply_admitted(admitted)
        for held in askers.values():
            held.asked = 0
            held.copy_due = False
        for refusal in answer.refusals:
            self._apply_refusal(refusal, asked, askers)

    def add_lease(self, column: bytes) -> None:
        """More spare blocks."""
        self.add_to_lease(_ids(column))

    def forget(self) -> None:
        """Nothing is held any more: the books of the KV manager will begin empty."""
        self.silence()
        self._untap(self.live.values())
        self.empty()
        self.spares.forget()
        self.copies = []
        self._foresight.forget()

    # How they do it.

    def _next_handle(self) -> int:
        self._handles += 1
        return self._handles

    def _ask(self, held: Held, tokens: int) -> None:
        if self.speaks and not held.asked:
            held.wants = max(held.wants, tokens)
            held.refused = None
            self.orders.ask(held)

    def _take(self, held: Held, count: int) -> None:
        """Takes spare blocks; an answer that brings others for the same place comes too late."""
        self.take(held, count)
        held.asked = held.wants = 0
        if self.speaks:
            self.orders.tell(held)

    def _give_back(self, kept: int) -> None:
        """Gives all spare blocks back but so many, with the next message."""
        excess = max(0, len(self.lease) - kept)
        self._returned += self.lease[:excess]
        del self.lease[:excess]

    def _apply_grants(self, grants: pb.Grants, askers: dict[int, Held]) -> None:
        self.copies += map(_copy, grants.copies)
        blocks = _ids(grants.block_ids)
        start = 0
        columns = (_ids(grants.handles), _ids(grants.first_indices), _ids(grants.counts))
        for handle, first, count in zip(*columns, strict=True):
            granted = blocks[start : start + count]
            start += count
            if handle in askers and handle in self.by_handle:
                self.grant(askers[handle], first, granted)

    def _apply_admitted(self, admitted: pb.Admitted) -> None:
        self.copies += map(_copy, admitted.copies)
        held = self._admitting.pop(admitted.handle, None)
        if held is None:
            return
        self.enter_admitted(held, _ids(admitted.block_ids), admitted.cached_tokens)
        self.spares.note_start(held)
        self._foresight.plan(held)
        self._results[held.handle] = Admission(held.blocks[:], held.cached)

    def _apply_refusal(self, refusal: pb.Refusal, asked: dict[int, Held], askers: dict[int, Held]) -> None:
        refused = Refused(refusal.reason, refusal.sentence)
        admitting = self._admitting.pop(refusal.handle, None)
        if admitting is not None:
            self._untap([admitting])
            self._results[refusal.handle] = refused
            if refusal.reason == POOL_SHORT:
                self.spares.note_refusal()
                self._turned_away.note(admitting.sequence_id)
            return
        if refusal.handle in askers:
            askers[refusal.handle].refused = refused
        elif refusal.handle not in asked and refusal.handle in self.by_handle:
            raise BrokenMirror(f"{self.by_handle[refusal.handle].sequence_id!r}: {refusal.sentence}")

    def _untap(self, ended: Iterable[Held]) -> None:
        if self.tap is not None:
            for held in ended:
                self.tap.end(held.handle)

    def _forget_questions(self) -> None:
        for held in self.live.values():
            held.asked = held.wants = 0
            held.copy_due = False
            held.refused = None
        self._asked.clear()
        self._untap(self._admitting.values())
        self._admitting.clear()
        self._results.clear()


def _ids(column: bytes) -> list[int]:
    return from_column(column, "block_ids").tolist()


def _copy(order: pb.BlockCopy) -> CopyOrder:
    return CopyOrder(order.source_block_id, order.target_block_id, order.num_tokens)
