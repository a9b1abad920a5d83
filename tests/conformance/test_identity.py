"""vllm-core.md 1b, items 16 to 19, the golden vectors of 1a.2, and the reports of section 2 about identity."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from tests.conformance import cbor_rule
from tests.conformance.client import COMMON, Client, Scope, refusal

NewPool = Callable[..., Client]

NONE_HASH = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
GOLDEN = [
    "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
    "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
    "117dad852830e0103c12d7c7f8b7cf58434ea8751d1f42ee07b1c93711e4da6c",
]
LOW_64_BITS = [2233398808101521225, 17911472383915781900, 554445467503876716]
FIRST_BLOCKS = [
    (Scope(salt="salt1"), "d5d12f19983da5bf554a6edbb10aa6ffac8228cc94da98f6e9466f9e69c97af0"),
    (Scope(salt="foo"), "5f6b6969b520b7d8d88767325e626213acb7a4109ea4a75d6af4cf724a0119be"),
    (Scope("foo", "/path/to/lora"), "0085450d1714b1f356f1f8095da9979f44370286e6fef873a8ccd34384203e6a"),
]
BASE = list(range(100, 116))


def test_golden_chain(pool: Client) -> None:
    pool.prefill("a", range(48))
    assert pool.hashes("a") == GOLDEN
    assert [int(name, 16) & (1 << 64) - 1 for name in pool.hashes("a")] == LOW_64_BITS


@pytest.mark.parametrize(("scope", "name"), FIRST_BLOCKS)
def test_golden_first_blocks(pool: Client, scope: Scope, name: str) -> None:
    pool.prefill("a", range(16), scope=scope)
    assert pool.hashes("a") == [name]


def test_16_salt(new_pool: NewPool) -> None:
    pool = new_pool(40)
    found = [
        pool.prefill(str(number), COMMON + [number] * 11, scope=Scope(salt=salt)).cached_tokens
        for number, salt in enumerate(["salt1", "salt1", "salt2", ""])
    ]
    # The last of the four is the reference's own derivation.
    assert found == [0, 48, 0, 0]
    assert [block.block_id for block in pool.table("1")[:3]] == [block.block_id for block in pool.table("0")[:3]]


def test_16_the_salt_is_a_key_of_the_first_block_only(pool: Client) -> None:
    pool.prefill("a", COMMON, scope=Scope(salt="salt1"))
    expected = cbor_rule.chain(COMMON, [[("cache_salt", "salt1")]])
    assert pool.hashes("a") == [name.hex() for name in expected]


def test_17_multimodal_keys(new_pool: NewPool) -> None:
    pool = new_pool(40)
    images = [("aaa", 11, 10), ("bbb", 30, 18)]
    keys: list[list[cbor_rule.Key]] = [
        [("mm", "aaa", 11)],
        [("mm", "aaa", -5), ("mm", "bbb", 14)],
        [("mm", "bbb", -2)],
    ]
    pool.prefill("first", COMMON + [3] * 11, spans=[*images, ("ccc", 48, 5)])
    assert pool.hashes("first")[:3] == [name.hex() for name in cbor_rule.chain(COMMON, keys)]
    second = pool.prefill("second", COMMON + [4] * 11, spans=[*images, ("ddd", 50, 5)])
    assert (list(second.block_ids[:3]), second.cached_tokens) == ([1, 2, 3], 48)
    others = [("aaa", 11, 10), ("xxx", 30, 18)], [("xxx", 11, 10), ("bbb", 30, 18)], []
    assert [pool.lookup([*COMMON, 9], spans=spans).cached_tokens for spans in others] == [16, 0, 0]


def test_18_an_adapter_is_no_salt_of_the_same_name(new_pool: NewPool) -> None:
    pool = new_pool(40)
    for scope in (Scope("x"), Scope(salt="x"), Scope("x", "2")):
        assert pool.prefill(repr(scope), COMMON, scope=scope).cached_tokens == 0
    names = [tuple(pool.hashes(repr(scope))) for scope in (Scope("x"), Scope(salt="x"), Scope("x", "2"))]
    assert len({name for each in names for name in each}) == 9


@pytest.mark.parametrize("seed", ["0", "1", "random"])
@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_19_none_hash_is_the_same_in_every_process(seed: str, algorithm: str) -> None:
    """Directly on kvmanager: what a first block follows is never on the wire."""
    # Differs: Octavo does not read PYTHONHASHSEED; and where vLLM draws a random parent for xxhash, because it can be
    # made to collide, a pool of xxh3 compares the tokens of every hit and takes no salt.
    here = cbor_rule.NONE_HASH.hex() if algorithm == "sha256" else none_hash_elsewhere(algorithm, "0")
    assert none_hash_elsewhere(algorithm, seed) == here
    assert cbor_rule.NONE_HASH.hex() == NONE_HASH


def none_hash_elsewhere(algorithm: str, seed: str) -> str:
    code = (
        "from kvmanager.hashing import none_hash; from kvmanager.types import HashAlgorithm; "
        f"print(none_hash(HashAlgorithm('{algorithm}')).hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "scope", [Scope(), Scope("foo", "/path/to/lora", "salt1"), Scope("\u00e4dapter", "", "s" * 100)]
)
def test_12621_names_are_recomputed_by_hand(pool: Client, scope: Scope) -> None:
    """GHSA-rm76-4mrf-v9r8, PR 12621, PR 15297."""
    tokens = awkward_tokens()
    pool.prefill("a", tokens, scope=scope)
    assert pool.hashes("a") == [name.hex() for name in cbor_rule.chain(tokens, keys_of(scope, 3))]


def test_12621_names_are_recomputed_in_another_language(pool: Client) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    tokens, scope = awkward_tokens(), Scope("foo", "/path/to/lora", "salt1")
    pool.prefill("a", tokens, scope=scope)
    told = json.dumps({"tokens": tokens, "keys": keys_of(scope, 3), "size": 16})
    script = Path(__file__).with_name("chain.js")
    done = subprocess.run([node, script, told], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == pool.hashes("a")


def awkward_tokens() -> list[int]:
    """48 ids at the edges where CBOR changes its width."""
    edges = [0, 1, 22, 23, 24, 25, 254, 255, 256, 257, 65534, 65535, 65536, 65537, (1 << 32) - 2, (1 << 32) - 1]
    return edges + edges[::-1] + edges


def keys_of(scope: Scope, blocks: int) -> list[list[cbor_rule.Key]]:
    each: list[cbor_rule.Key] = [("lora", scope.adapter, scope.version)] if scope.adapter else []
    first: list[cbor_rule.Key] = [("cache_salt", scope.salt)] if scope.salt else []
    return [each + (first if index == 0 else []) for index in range(blocks)]


@pytest.mark.parametrize(
    "other",
    [
        [BASE[0] + 1, BASE[1] - 31, *BASE[2:]],
        [*BASE[:7], BASE[7] + 1, BASE[8] - 31, *BASE[9:]],
        [BASE[1], BASE[0], *BASE[2:]],
        [*BASE[:15], 0],
        [0, *BASE[:15]],
    ],
)
def test_4158_near_blocks_never_meet(pool: Client, other: Sequence[int]) -> None:
    """Megatron-LM PR 4158: pairs on which a rolling hash collides."""
    pool.cache("a", BASE)
    assert pool.lookup([*BASE, 1]).cached_tokens == 16
    assert pool.allocate("b", [*other, 1]).cached_tokens == 0


def test_44701_a_salt_and_an_adapter_of_one_name(pool: Client) -> None:
    pool.cache("a", COMMON, scope=Scope(salt="x"))
    assert pool.cache("b", [*COMMON, 9], scope=Scope("x")).cached_tokens == 0


def test_30931_an_adapter_loaded_anew_under_its_name(pool: Client) -> None:
    """Also 42125, PR 27211."""
    pool.cache("a", COMMON, scope=Scope("x", "1"))
    assert pool.cache("b", [*COMMON, 9], scope=Scope("x", "2")).cached_tokens == 0
    assert pool.cache("c", [*COMMON, 9], scope=Scope("x", "1")).cached_tokens == 48


def test_3301_two_thousand_contents_behind_equal_tokens(new_pool: NewPool) -> None:
    """LMCache 3301, 4086: of 2,000 content ids that are cut to 16 bits, some 30 pairs meet."""
    pool = new_pool(2002, 4)
    for number in range(2000):
        assert pool.cache("a", [1] * 5, spans=[(f"image {number}", 0, 4)]).cached_tokens == 0
    assert pool.index_size == 2000
    assert pool.lookup([1] * 5, spans=[("image 1999", 0, 4)]).cached_tokens == 4
    assert pool.lookup([1] * 5, spans=[("image 2000", 0, 4)]).cached_tokens == 0


def test_54727_a_hash_that_can_be_made_to_collide_parts_no_tenants(new_pool: NewPool) -> None:
    pool = new_pool(11, hash_algorithm=pb.HASH_ALGORITHM_XXH3)
    refused = refusal(lambda: pool.allocate("a", COMMON, scope=Scope(salt="s")))
    assert (refused.code, "xxh3" in refused.sentence) == ("INVALID_ARGUMENT", True)
    pool.prefill("a", COMMON)
    assert [len(name) for name in pool.hashes("a")] == [32, 32, 32]
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48


def test_17045_salts_are_opaque_and_bounded(pool: Client) -> None:
    """1a.2: vLLM takes 1 to 128 characters without some; Octavo takes any 128 bytes, for it never writes them down."""
    for salt in ("a/b\\c@d", "\u00e4" * 64, "x" * 128):
        assert pool.cache(salt, COMMON, scope=Scope(salt=salt)).cached_tokens == 0
        assert pool.lookup([*COMMON, 9], scope=Scope(salt=salt)).cached_tokens == 48
    refused = refusal(lambda: pool.lookup(COMMON, scope=Scope(salt="\u00e4" * 65)))
    assert (refused.code, refused.metadata["bytes"]) == ("INVALID_ARGUMENT", "130")
