"""What a branch holds, in few bytes, against the contents of its chain one by one."""

import random
from array import array

import pytest

from kvmanager.block_contents import BlockContents
from kvmanager.hashing import HashChain
from kvmanager.types import CacheScope, ContentSpan

SIZE = 4
LARGEST = {"two bytes": 1 << 16, "three bytes": 1 << 24, "four bytes": 1 << 32}


def chain_of(token_ids: list[int], salt: str = "", spans: tuple[ContentSpan, ...] = ()) -> HashChain:
    return HashChain(array("I", token_ids), SIZE, CacheScope("a", "1", salt), spans)


def kept(chain: HashChain, first: int, last: int) -> BlockContents:
    contents = BlockContents(SIZE, chain.keys(last - 1))
    contents.extend(chain, first, last)
    return contents


@pytest.mark.parametrize("ends", [(256,), (256, 1 << 16), (256, 1 << 24), (1 << 16, 256, 1 << 32, 1 << 24)])
@pytest.mark.parametrize("salt", ["", "s"])
def test_blocks_hold_what_their_chain_has_as_the_branch_grows_and_shrinks(ends: tuple[int, ...], salt: str) -> None:
    draw = random.Random(repr((ends, salt)))
    tokens = [draw.choice((0, end - 1, draw.randrange(end))) for end in ends for _ in range(5 * SIZE)]
    chain = chain_of(tokens, salt, (ContentSpan("cat", 5, 2 * SIZE),))
    contents = BlockContents(SIZE, chain.keys(4))
    for part in range(len(ends)):
        contents.extend(chain, 5 * part, 5 * part + 5)
        assert [contents.content(place) for place in range(len(contents))] == [
            chain.content(index) for index in range(5 * part + 5)
        ]
    for left in (5 * len(ends) - 1, 2, 1):
        contents.shorten(len(contents) - left)
        assert [contents.content(place) for place in range(len(contents))] == [
            chain.content(index) for index in range(left)
        ]
    # What comes after has keys of its own, and not those of what was there.
    plain = chain_of(tokens, salt)
    contents.extend(plain, 1, 5)
    assert contents.content(2) == plain.content(2) != chain.content(2)


@pytest.mark.parametrize("end", LARGEST.values(), ids=LARGEST)
@pytest.mark.parametrize("place", [0, 1, SIZE, 4 * SIZE - 1])
def test_a_chain_is_equal_up_to_the_block_of_its_first_other_token(end: int, place: int) -> None:
    tokens = [7 * each % 251 for each in range(4 * SIZE)]
    contents = kept(chain_of([1] * SIZE + tokens), 1, 5)
    assert contents.num_equal(chain_of([2] * SIZE + tokens), 1, 9) == 4
    assert contents.num_equal(chain_of([2] * SIZE + tokens), 1, 3) == 3
    # Also where only bytes that are not kept differ.
    tokens[place] += end >> 8
    assert contents.num_equal(chain_of([2] * SIZE + tokens), 1, 9) == place // SIZE


def test_blocks_of_other_keys_are_not_equal() -> None:
    tokens = [3] * (4 * SIZE)
    contents = kept(chain_of(tokens, "s"), 0, 4)
    assert contents.num_equal(chain_of(tokens, "s"), 0, 4) == 4
    assert contents.num_equal(chain_of(tokens), 0, 4) == 0
    spans = (ContentSpan("cat", 2 * SIZE, 1),)
    assert contents.num_equal(chain_of(tokens, "s", spans), 0, 4) == 2
    assert kept(chain_of(tokens, "s", spans), 0, 4).num_equal(chain_of(tokens, "s"), 0, 4) == 2
