"""The tree of names as branches: what grows, where paths part, and what is left when ends are given up."""

from array import array

import pytest

from kvmanager.hash_index import HashIndex
from kvmanager.hashing import HashChain
from kvmanager.prefix_index import NO_BLOCK, NO_NAME


def chain_of(*token_ids: int) -> HashChain:
    """A chain of blocks of one token."""
    chain = HashChain(array("I", token_ids), 1)
    chain.compute(len(token_ids))
    return chain


@pytest.fixture
def index() -> HashIndex:
    """Tokens 1 to 5 in blocks 11 to 15, published 1 to 3 first; and 1, 2, 8, 9 in 11, 12, 18, 19."""
    index = HashIndex(30)
    index.publish([11, 12, 13], chain_of(1, 2, 3), 0, 3)
    index.publish([11, 12, 13, 14, 15], chain_of(1, 2, 3, 4, 5), 3, 5)
    index.publish([11, 12, 18, 19], chain_of(1, 2, 8, 9), 2, 4)
    return index


def shape(index: HashIndex) -> list[tuple[list[int], int]]:
    return sorted((branch.blocks, branch.before()) for branch in index.branches())


def found(index: HashIndex, *token_ids: int) -> list[int]:
    return index.match(chain_of(*token_ids), len(token_ids))


def test_what_continues_an_end_is_of_the_same_branch_and_a_second_continuation_begins_one(index: HashIndex) -> None:
    assert shape(index) == [([11, 12, 13, 14, 15], NO_BLOCK), ([18, 19], 12)]
    assert dict(index.children()) == {12: 2, 15: 0, 19: 0}
    assert len(index) == 7


@pytest.mark.parametrize(
    ("token_ids", "blocks"),
    [
        ((1, 2, 3, 4, 5), [11, 12, 13, 14, 15]),
        ((1, 2, 3, 4, 5, 6), [11, 12, 13, 14, 15]),
        ((1, 2, 3, 4), [11, 12, 13, 14]),
        ((1, 2, 3, 9, 5), [11, 12, 13]),
        ((1, 2, 8, 9, 9), [11, 12, 18, 19]),
        ((1, 2, 8, 4), [11, 12, 18]),
        ((1, 9), [11]),
        ((2, 3), []),
        ((8, 9), []),
    ],
)
def test_a_prompt_is_followed_from_branch_to_branch(
    index: HashIndex, token_ids: tuple[int, ...], blocks: list[int]
) -> None:
    assert found(index, *token_ids) == blocks
    assert index.match(chain_of(*token_ids), 2) == blocks[:2]


def test_a_name_is_found_behind_the_block_before_it_alone_or_at_the_start_of_a_branch(index: HashIndex) -> None:
    names, other = chain_of(1, 2, 3, 4, 5, 6).names, chain_of(1, 2, 8).names
    before = [NO_BLOCK, 11, 12, 13, 14, 15]
    owners = [index.find(name, place, before[place]) for place, name in enumerate(names)]
    assert owners == [11, 12, 13, 14, 15, NO_BLOCK]
    assert index.find(other[2], 2, 12) == 18
    assert index.find(chain_of(1, 2, 7).names[2], 2, 12) == NO_BLOCK


def test_the_end_of_a_chain_goes_back_to_where_another_part_begins(index: HashIndex) -> None:
    assert index.continued_once([15, 14, 13])
    assert index.continued_once([19, 18])
    assert not index.continued_once([15, 14, 13, 12])
    assert not index.continued_once([19, 18, 12])
    index.withdraw_leaves([15, 14, 13])
    assert index.continued_once([19, 18, 12, 11])
    index.withdraw_leaves([19, 18])
    assert index.continued_once([12, 11])


def test_ends_are_given_up_into_the_branch_that_they_grew_from(index: HashIndex) -> None:
    assert index.withdraw_leaves([15, 14, 13]) == 12
    assert shape(index) == [([11, 12], NO_BLOCK), ([18, 19], 12)]
    assert dict(index.children()) == {19: 0}
    assert index.withdraw_leaves([19, 18, 12]) == 11
    assert shape(index) == [([11], NO_BLOCK)]
    assert dict(index.children()) == {11: 0}
    assert index.withdraw_leaves([11]) == NO_BLOCK
    assert (index.branches(), dict(index.children()), len(index)) == ([], {}, 0)
    assert set(index.names) == {NO_NAME}


def test_a_branch_that_was_cut_to_where_others_part_grows_again(index: HashIndex) -> None:
    index.withdraw_leaves([15, 14, 13])
    index.publish([11, 12, 23], chain_of(1, 2, 7), 2, 3)
    assert shape(index) == [([11, 12, 23], NO_BLOCK), ([18, 19], 12)]
    assert found(index, 1, 2, 8, 9) == [11, 12, 18, 19]


def test_heirs_take_the_places_of_owners_one_by_one_in_either_order(index: HashIndex) -> None:
    for spare, owner in ((21, 11), (22, 12), (23, 13), (24, 14), (25, 15)):
        index.add_spare(spare, owner)
    assert [index.twin(block) for block in (11, 21, 18)] == [21, 11, NO_BLOCK]
    for owner in (15, 14, 13):
        assert index.withdraw(owner) == NO_BLOCK
    for owner in (11, 12):
        assert index.withdraw(owner) == NO_BLOCK
    assert shape(index) == [([18, 19], 22), ([21, 22, 23, 24, 25], NO_BLOCK)]
    assert [index.parent(block) for block in (25, 24, 23, 22, 21, 18, 19)] == [24, 23, 22, 21, NO_BLOCK, 22, 18]
    assert dict(index.children()) == {22: 2, 25: 0, 19: 0}
    assert not index.has_spares()
    assert found(index, 1, 2, 3, 4, 5) == [21, 22, 23, 24, 25]


def test_what_follows_a_spare_continues_the_owner_of_its_name(index: HashIndex) -> None:
    index.add_spare(25, 15)
    assert (index.owner(25), index.parent(25), index.num_blocks(index.names[25])) == (15, 14, 2)
    index.publish([11, 12, 13, 14, 25, 16], chain_of(1, 2, 3, 4, 5, 6), 5, 6)
    assert shape(index) == [([11, 12, 13, 14, 15, 16], NO_BLOCK), ([18, 19], 12)]
    assert index.find(chain_of(1, 2, 3, 4, 5, 6).names[5], 5, 25) == 16
