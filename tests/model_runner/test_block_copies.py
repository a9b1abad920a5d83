"""Copies for copy-on-write: exactly the slots that are ordered, in order, and all together in a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_runner.attention.flash_attn import FlashAttention
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.nhd import GpuAttention
from model_runner.attention.triton import TritonAttention
from model_runner.books import CopyOrder
from tests.model_runner.attention_world import World, assert_near, shape_of
from tests.model_runner.test_attention import COPYING, numbered, slots_of


def naive_copies(cache: Tensor, copies: Sequence[CopyOrder]) -> Tensor:
    """One slot after the other, one order after the other, in the layout of slots_of()."""
    for copy in copies:
        for layer in range(cache.shape[0]):
            for slot in range(copy.num_tokens):
                cache[layer, copy.target, slot] = cache[layer, copy.source, slot].clone()
    return cache


class Operations(TorchDispatchMode):
    """The names of torch's operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


class TestCopies:
    @pytest.mark.parametrize(
        "copies",
        [
            pytest.param([(1, 2, 8)], id="a whole block"),
            pytest.param([(7, 1, 5)], id="from the highest block"),
            pytest.param([(1, 7, 1)], id="one slot"),
            pytest.param([(1, 2, 3), (1, 3, 3)], id="one source, two targets"),
            pytest.param([(1, 2, 3), (2, 3, 6), (3, 4, 8)], id="a chain"),
            pytest.param([(2, 3, 6), (1, 2, 3)], id="a chain, last link first"),
            pytest.param([(1, 2, 7), (2, 1, 8)], id="there and back"),
            pytest.param([], id="none"),
        ],
    )
    @pytest.mark.parametrize("name", COPYING)
    def test_exactly_the_first_slots_in_all_layers_and_in_order(
        self, name: str, copies: list[tuple[int, int, int]]
    ) -> None:
        backend = numbered(name)
        orders = [CopyOrder(*each) for each in copies]
        expected = [naive_copies(each, orders) for each in slots_of(backend)]
        backend.copy_blocks(orders)
        for actual, wanted in zip(slots_of(backend), expected, strict=True):
            assert torch.equal(actual, wanted)

    @pytest.mark.parametrize("name", COPYING)
    def test_many_are_as_many_operations_as_one(self, name: str) -> None:
        """Batched: with Triton one launch, else one reading and one writing each for K and for V."""
        done = []
        for count in (1, 3):
            backend = numbered(name)
            kernels = mock.MagicMock()
            if isinstance(backend, GpuAttention):
                backend._kernels = kernels
            with Operations() as operations:
                backend.copy_blocks([CopyOrder(2 * each + 1, 2 * each + 2, 8) for each in range(count)])
            launches = kernels.copy_blocks.__getitem__.return_value.call_count
            assert launches == isinstance(backend, GpuAttention)
            done.append(operations.names)
        assert done[0] == done[1]
        assert sum(each.startswith("index_put") for each in done[1]) == 2 * (1 - launches)

    @pytest.mark.parametrize("kind", [FlashInferAttention, FlashAttention, TritonAttention])
    def test_all_backends_of_gpus_copy_alike(self, kind: type[GpuAttention]) -> None:
        assert kind.copy_blocks is GpuAttention.copy_blocks

    @pytest.mark.parametrize("name", COPYING)
    def test_a_fork_goes_on_from_its_copy(self, name: str) -> None:
        """Parent and child share a full block and 5 slots of the next; the child writes its 22nd token to a copy."""
        world = World(name, shape_of(), [24, 24])
        parent, child = world.sequences
        for mine, theirs in ((child.keys, parent.keys), (child.values, parent.values)):
            mine[:, :21] = theirs[:, :21]
        world.step([(0, 21)])
        child.computed, child.table[0] = 21, parent.table[0]
        world.backend.copy_blocks([CopyOrder(parent.table[1], child.table[1], 5)])
        outputs = world.step([(0, 3), (1, 3)])
        for sequence, output in zip(world.sequences, outputs, strict=True):
            assert_near(output, sequence.expected(world.shape)[:, 21:])
