"""The card that is not there refuses what CUDA refuses, and finds out who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from model_runner.device_copies import CudaLane, Downloads, Uploads, to_device
from tests.model_runner.fake_card import CARD, Card, CardTensor, MixedDevices, Waits, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def card() -> Iterator[Card]:
    with Card() as card:
        yield card


def numbers() -> torch.Tensor:
    return torch.arange(6, device=CARD)


def test_its_tensors_say_so_and_have_the_numbers(card: Card) -> None:
    made = numbers().view(2, 3)[1] * 2 + torch.zeros(3, dtype=torch.int64, device=CARD)
    assert isinstance(made, CardTensor)
    assert made.device == CARD
    assert made.tolist() == [6, 8, 10]
    made.add_(1)
    made[torch.tensor([0], device=CARD)] = 5
    assert made.cpu().tolist() == [5, 9, 11]


@pytest.mark.parametrize(
    "mix",
    [
        lambda: numbers() + torch.arange(6),
        lambda: numbers()[torch.tensor([1, 2])],
        lambda: torch.where(numbers() > 2, numbers(), torch.arange(6)),
        lambda: numbers().gather(0, torch.tensor([1])),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), torch.zeros(3, 2, device=CARD)),
    ],
)
def test_tensors_of_both_places_do_not_mix(card: Card, mix: Callable[[], object]) -> None:
    with pytest.raises(MixedDevices):
        mix()


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.max()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 2),
        lambda x: x[x > 2],
        lambda x: x.masked_select(x > 2),
        lambda x: x.__setitem__(x > 2, torch.zeros(3, dtype=torch.int64, device=CARD)),
        lambda x: torch.repeat_interleave(x, x),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1, 2], device=CARD),
        lambda x: torch.tensor([1, 2]).to(CARD),
        lambda x: torch.tensor([1, 2]).to(CARD, non_blocking=True),
        lambda x: x.copy_(torch.arange(6), non_blocking=True),
        lambda x: torch.arange(6).pin_memory().to(CARD),
        lambda x: torch.empty(6, dtype=torch.int64).copy_(x, non_blocking=True),
        lambda x: torch.cuda.synchronize(CARD),
    ],
)
def test_who_waits_is_found_out(card: Card, wait: Callable[[torch.Tensor], object], in_inference_mode: bool) -> None:
    with torch.inference_mode(in_inference_mode):
        wait(numbers())
        with card.nobody_waits(), pytest.raises(Waits):
            wait(numbers())


def test_what_waits_for_nothing(card: Card) -> None:
    given = numbers()
    with card.nobody_waits():
        rows = to_device(torch.tensor([1, 3]), CARD)
        taken = given[rows].repeat_interleave(2).masked_fill(given[:4] > 1, 9).cumsum(0).topk(2).values
        torch.empty(2, dtype=torch.int64, pin_memory=True).copy_(taken, non_blocking=True)
    assert taken.tolist() == [20, 11]


def test_an_event_behind_a_product_is_waited_for_in_vain(card: Card) -> None:
    lane = CudaLane(CARD)
    with card.nobody_waits():
        lane.mark().wait()
        torch.ones(2, 2, device=CARD) @ torch.ones(2, 2, device=CARD)
        mark = lane.mark()
        with pytest.raises(Waits, match="behind the step's products"):
            mark.wait()
    mark.wait()
    with card.nobody_waits():
        mark.wait()


def test_copies_are_under_way_until_somebody_waits(card: Card) -> None:
    lane = CudaLane(CARD)
    host = lane.host_bytes(8)
    host.fill_(3)
    sent = torch.zeros(8, dtype=torch.uint8, device=CARD)
    lane.copy(sent, host)
    back = lane.host_bytes(8)
    lane.copy(back, sent)
    assert back.tolist() == [0xA5] * 8
    lane.mark().wait()
    assert back.tolist() == [3] * 8
    lane.copy(sent, host)
    host.fill_(4)
    with pytest.raises(AssertionError, match="written while it was being copied"):
        lane.mark().wait()


def test_the_lane_of_cuda_brings_what_it_is_given(card: Card) -> None:
    lane = CudaLane(CARD)
    uploads, downloads = Uploads(lane, CARD), Downloads(lane)
    for number in range(5):
        with card.nobody_waits():
            sent = uploads.send([torch.arange(number + 1), torch.tensor([number / 2])])
            download = downloads.fetch(sent)
        whole, half = download.take()
        assert (whole.tolist(), half.tolist()) == (list(range(number + 1)), [number / 2])


def test_bytes_are_those_of_what_lives(card: Card) -> None:
    before = card.bytes
    made = torch.zeros(1000, dtype=torch.float32, device=CARD)
    view = made[10:]
    assert card.bytes == before + 4000
    del made
    assert card.bytes == before + 4000
    doubled = view * 2
    del view
    assert (card.bytes, card.most_bytes) == (before + 990 * 4, before + 4000 + 990 * 4)
    del doubled
    assert card.bytes == before


def test_a_kernel_takes_what_is_on_the_card(card: Card) -> None:
    launch = card.kernel(lambda x, y: x.add_(y))
    given = numbers()
    launch(given, y=numbers())
    assert given.tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(MixedDevices):
        launch(given, torch.arange(6))
