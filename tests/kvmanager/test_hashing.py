"""Block names against values recomputed outside Octavo (vLLM's sha256_cbor layout) and against its byte layout."""

import hashlib
import random
from array import array

import pytest

from kvmanager.hashing import NONE_HASH, HashChain, extra_keys, hash_block
from kvmanager.types import BASE_SCOPE, CacheScope

FIRST = tuple(range(16))
CHAIN = [
    "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
    "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
    "117dad852830e0103c12d7c7f8b7cf58434ea8751d1f42ee07b1c93711e4da6c",
]


def chain(tokens, size=16, scope=BASE_SCOPE):
    return HashChain(array("I", tokens), size, scope)


def test_none_hash():
    assert NONE_HASH.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_chain_of_48_tokens():
    names = chain(range(48))
    assert [names.name(index).hex() for index in (2, 0, 1)] == [CHAIN[2], CHAIN[0], CHAIN[1]]


@pytest.mark.parametrize(
    ("salt", "name"),
    [
        ("salt1", "d5d12f19983da5bf554a6edbb10aa6ffac8228cc94da98f6e9466f9e69c97af0"),
        ("foo", "5f6b6969b520b7d8d88767325e626213acb7a4109ea4a75d6af4cf724a0119be"),
    ],
)
def test_salted_first_block(salt, name):
    assert chain(FIRST, scope=CacheScope(salt=salt)).name(0).hex() == name


def test_adapter_block():
    scope = CacheScope(adapter_id="foo", adapter_version="/path/to/lora")
    name = "0085450d1714b1f356f1f8095da9979f44370286e6fef873a8ccd34384203e6a"
    assert chain(FIRST, scope=scope).name(0).hex() == name


def test_preimage_is_canonical_cbor():
    preimage = bytes.fromhex("835820") + NONE_HASH + bytes([0x90, *FIRST]) + bytes([0xF6])
    assert hash_block(NONE_HASH, FIRST) == hashlib.sha256(preimage).digest()


def test_salt_is_in_the_first_block_only_and_adapter_in_each():
    scope = CacheScope("a", "1", "s")
    assert extra_keys(scope, 0) == (("lora", "a", "1"), ("cache_salt", "s"))
    assert extra_keys(scope, 1) == (("lora", "a", "1"),)
    assert extra_keys(CacheScope(salt="s"), 1) is None


def test_an_adapter_is_not_a_salt_of_the_same_name():
    assert chain(FIRST, scope=CacheScope("x")).name(0) != chain(FIRST, scope=CacheScope(salt="x")).name(0)


def test_neighbouring_blocks_differ():
    """The pairs on which other systems' rolling hashes collide: (+1, -31), swapped tokens, zero padding."""
    base = list(range(100, 116))
    shifted = [base[0] + 1, base[1] - 31, *base[2:]]
    swapped = [base[1], base[0], *base[2:]]
    padded = [*base[:15], 0]
    names = {hash_block(NONE_HASH, tuple(tokens)) for tokens in (base, shifted, swapped, padded)}
    assert len(names) == 4


EDGES = [0, 23, 24, 255, 1 << 16, (1 << 16) + 255, 1 << 24, (1 << 24) - 1, 1 << 31, (1 << 32) - 1]


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("edges", [EDGES, [(1 << 16) + 256], [(1 << 24) + 256]])
def test_ids_of_every_size_in_a_long_prompt(block_size, share, edges):
    """The names by the rule, with cbor2: ids at the edges of each size of integer among those of three bytes."""
    rng = random.Random(block_size)
    usual = [256, 257, 512, 49_151, 65_280, 65_535]
    # More than are encoded at once, where that is quick.
    num_blocks = 2_100 if block_size == 1 else 40
    token_ids = [rng.choice(edges if rng.random() < share else usual) for _ in range(num_blocks * block_size + 3)]
    chain = HashChain(array("I", token_ids), block_size)
    chain.compute(3)
    chain.compute(num_blocks)
    parent, names = NONE_HASH, []
    for start in range(0, num_blocks * block_size, block_size):
        parent = hash_block(parent, tuple(token_ids[start : start + block_size]))
        names.append(parent)
    assert chain.names == names


def test_a_copied_chain_goes_its_own_way():
    first = chain([1, 2, 3, 4, 5], size=2)
    second = first.copy()
    first.token_ids.append(6)
    second.token_ids.append(7)
    assert first.name(1) == second.name(1)
    assert first.name(2) != second.name(2)
    assert first.name(2) == chain([1, 2, 3, 4, 5, 6], size=2).name(2)
