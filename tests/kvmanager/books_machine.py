"""A hypothesis machine that drives a pool beside the naive model with every verb and every failure.

The strongest check is that of contents: the model writes what a runner would write where the tables say, so a block
handed to two writers, a copy left out or a hit on foreign data shows as wrong contents. The next one is that of
expectations: the model says before each verb whether it must be refused, and why, from tables and events alone.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvmanager.types import EvictionKind, HashAlgorithm, IndexKind, PoolSpec
from tests.kvmanager.books_lease_rules import LeaseRules
from tests.kvmanager.books_port import BooksPort, TwinPort

INDEXES = st.sampled_from([IndexKind.RADIX, IndexKind.HASH, IndexKind.RADIX, IndexKind.HASH, IndexKind.NONE])


class BooksMachine(LeaseRules):
    """One pool of any kind."""

    @initialize(
        num_blocks=st.sampled_from([2, 4, 6, 8, 9, 12, 16]),
        size=st.sampled_from([1, 2, 4, 4]),
        index=INDEXES,
        algorithm=st.sampled_from([HashAlgorithm.SHA256, HashAlgorithm.SHA256, HashAlgorithm.XXH3]),
        eviction=st.sampled_from(list(EvictionKind)),
    )
    def open(self, num_blocks, size, index, algorithm, eviction):
        self.begin(PoolSpec(num_blocks, size, hash_algorithm=algorithm, index=index, eviction=eviction))

    @invariant()
    def books_are_right(self):
        if hasattr(self, "port"):
            self.check_all()


class TwinMachine(LeaseRules):
    """A radix pool and a hash pool with the same history."""

    # What is found inside a block makes a part of a prompt end elsewhere.
    promises_parts = False

    @initialize(
        num_blocks=st.sampled_from([2, 4, 6, 8, 9, 12, 16]),
        size=st.sampled_from([2, 4]),
        algorithm=st.sampled_from([HashAlgorithm.SHA256, HashAlgorithm.SHA256, HashAlgorithm.XXH3]),
        eviction=st.sampled_from(list(EvictionKind)),
    )
    def open(self, num_blocks, size, algorithm, eviction):
        spec = PoolSpec(num_blocks, size, hash_algorithm=algorithm, index=IndexKind.RADIX, eviction=eviction)
        self.begin(spec)

    def make_port(self, spec: PoolSpec) -> BooksPort:
        return TwinPort(spec)

    @invariant()
    def books_are_right(self):
        if hasattr(self, "port"):
            self.check_all()
