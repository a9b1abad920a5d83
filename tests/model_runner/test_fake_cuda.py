"""The card with streams, graphs and an end refuses what CUDA refuses; and our captures on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model_runner.decode_graphs import CudaCapture
from model_runner.device_copies import CudaLane, to_device
from tests.model_runner.fake_card import CARD, why_not
from tests.model_runner.fake_cuda import CudaCard, NotForCapture, Unordered

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def card() -> Iterator[CudaCard]:
    with CudaCard() as card:
        yield card


def numbers() -> Tensor:
    return torch.arange(6.0, device=CARD)


class TestStreams:
    def test_one_that_has_not_waited_is_found_out(self, card: CudaCard) -> None:
        given, side = numbers(), torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(Unordered, match="stream 1 touches what stream 0 has written"):
            given + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made = given + 1
            given.add_(1)
        for touch in (lambda: made + 1, lambda: given + 1):
            with pytest.raises(Unordered, match="stream 0 touches what stream 1 has written"):
                touch()
        torch.cuda.current_stream().wait_stream(side)
        assert (made + given).tolist() == [2, 4, 6, 8, 10, 12]

    def test_who_waits_for_a_stream_knows_what_that_has_waited_for(self, card: CudaCard) -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            made = numbers()
        second.wait_stream(first)
        torch.cuda.current_stream().wait_stream(second)
        assert (made + 1).tolist() == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("wait", [lambda: torch.cuda.synchronize(), lambda: CudaLane(CARD).mark().wait()])
    def test_what_the_host_has_waited_for_is_done(self, card: CudaCard, wait: Callable[[], None]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            made = numbers()
            wait()
        assert (made + 1).tolist() == [1, 2, 3, 4, 5, 6]

    def test_a_mark_before_a_write_says_nothing_of_it(self, card: CudaCard) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = numbers()
            mark = CudaLane(CARD).mark()
            made.add_(1)
        mark.wait()
        with pytest.raises(Unordered):
            made + 1

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.cuda.Stream(colour=1).wait_stream(),
            lambda: torch.cuda.Event(True, False, False, False, 1),
            lambda: torch.cuda.Event().record(1, 2),
            lambda: torch.cuda.CUDAGraph(False, True),
            lambda: torch.cuda.graph(),
            lambda: torch.cuda.CUDAGraph().capture_begin(mode="global"),
            lambda: torch.cuda.memory_reserved(CARD, 1),
        ],
    )
    def test_calls_are_such_as_torch_takes(self, card: CudaCard, call: Callable[[], object]) -> None:
        with pytest.raises(TypeError):
            call()


def captured(compute: Callable[[], object], **options: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        compute()
    return graph


class TestGraphs:
    def test_a_replay_repeats_the_operations_and_nothing_else(self, card: CudaCard) -> None:
        given, calls = numbers(), []

        def compute() -> Tensor:
            calls.append(1)
            return (given + 1).mul_(2)[1:]

        replay = CudaCapture()(compute)
        assert len(calls) == 2
        given.add_(10)
        output = replay()
        assert output.tolist() == [24, 26, 28, 30, 32]
        given.zero_()
        assert replay() is output
        assert output.tolist() == [2] * 5
        assert (len(calls), card.replays) == (2, 2)

    def test_nothing_is_computed_before_a_replay(self, card: CudaCard) -> None:
        given, made = numbers(), []
        graph = captured(lambda: made.append(given * 2))
        assert made[0].isnan().all()
        graph.replay()
        assert made[0].tolist() == [0, 2, 4, 6, 8, 10]

    @pytest.mark.parametrize(
        "compute",
        [
            lambda x: x.max().item(),
            lambda x: x[x > 2],
            lambda x: torch.cuda.synchronize(),
            lambda x: CudaLane(CARD).mark().wait(),
            lambda x: x + to_device(torch.arange(6), CARD),
            lambda x: x.cpu(),
        ],
    )
    def test_nobody_waits_within(self, card: CudaCard, compute: Callable[[Tensor], object]) -> None:
        given = numbers()
        with pytest.raises(NotForCapture):
            captured(lambda: compute(given))

    def test_not_on_the_default_stream(self, card: CudaCard) -> None:
        with pytest.raises(NotForCapture, match="not the default one"):
            captured(numbers, stream=torch.cuda.current_stream())

    def test_not_on_two_streams(self, card: CudaCard) -> None:
        def compute() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                numbers()

        with pytest.raises(NotForCapture, match="another stream"):
            captured(compute)

    def test_not_twice(self, card: CudaCard) -> None:
        graph = captured(numbers)
        with pytest.raises(NotForCapture, match="once"), torch.cuda.graph(graph):
            pass
        with pytest.raises(NotForCapture, match="nothing to replay"):
            torch.cuda.CUDAGraph().replay()


class TestMemory:
    def test_graphs_of_one_pool_take_turns_and_give_it_back_at_last(self, card: CudaCard) -> None:
        """1,000 and 600 numbers of four bytes: a pool has the larger, two pools have both."""
        before = card.reserved
        shared = torch.cuda.graph_pool_handle()
        graphs = [captured(lambda size=size: torch.zeros(size, device=CARD), pool=shared) for size in (1000, 600)]
        assert card.reserved == before + 4000
        graphs.append(captured(lambda: torch.zeros(600, device=CARD)))
        assert card.reserved == before + 6400
        del graphs[2]
        assert card.reserved == before + 4000
        del graphs[0]
        assert card.reserved == before + 4000
        graphs.clear()
        assert card.reserved == before

    def test_an_output_that_lives_is_not_taken_again(self, card: CudaCard) -> None:
        before, capture = card.reserved, CudaCapture()
        replays = [capture(lambda: torch.zeros(1000, device=CARD)) for _ in range(2)]
        assert card.reserved == before + 8000
        assert len(replays) == 2

    def test_it_has_an_end(self) -> None:
        with CudaCard(total_bytes=10_000) as card:
            kept = torch.zeros(2000, device=CARD)
            with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 4000 bytes"):
                torch.zeros(1000, device=CARD)
            assert card.reserved == 8000
            assert torch.cuda.mem_get_info() == (2000, 10_000)
            del kept
            assert len(torch.zeros(2500, device=CARD)) == 2500


class TestCudaCapture:
    def test_all_graphs_have_one_stream(self, card: CudaCard) -> None:
        """For each stream that ever multiplied matrices cuBLAS keeps a workspace."""
        given, capture = torch.ones(3, 3, device=CARD), CudaCapture()
        before = len(card.streams)
        replays = [capture(lambda: given @ given) for _ in range(3)]
        assert len(card.streams) == before
        assert [replay()[0, 0].item() for replay in replays] == [3, 3, 3]

    def test_all_graphs_have_one_pool(self, card: CudaCard) -> None:
        """1,000 numbers of four bytes for a moment, of which two, and then one, are copied and remain."""
        before, capture = card.reserved, CudaCapture()
        replays = [capture(lambda size=size: torch.ones(1000, device=CARD)[:size].clone()) for size in (2, 1)]
        assert card.reserved == before + 8 + 4000 + 4
        assert [replay().tolist() for replay in replays] == [[1, 1], [1]]

    def test_what_is_computed_before_is_given_back(self, card: CudaCard) -> None:
        before = card.reserved
        replay = CudaCapture()(lambda: torch.zeros(1000, device=CARD).add_(1)[:2])
        assert replay().tolist() == [1, 1]
        # The graph's own; what was computed to warm up is nobody's.
        assert card.reserved == before + 4000
