"""Copies that are under way: a buffer is not written before it was read, nor read before it was written.

The lane here does nothing before somebody waits for it. Till then a host buffer that is to be read must stay as it is,
and one that is to be written holds nonsense; afterwards the one that was read holds nonsense too.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from model_runner.device_copies import Downloads, Uploads

NONSENSE = 0xA5
CPU = torch.device("cpu")


class SlowLane:
    """A device whose copies are under way until a mark behind them is waited for."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, Tensor, Tensor]] = deque()
        self._host: list[Tensor] = []
        self.done = self.given = 0

    def host_bytes(self, count: int) -> Tensor:
        self._host.append(torch.full((count,), NONSENSE, dtype=torch.uint8))
        return self._host[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        given = source.clone()
        if self._is_host(target):
            target.view(torch.uint8).fill_(NONSENSE)
        else:
            # The device's own work is done in order, so that it finds what was sent.
            target.copy_(given)
        self._under_way.append((target, source, given))
        self.given += 1

    def mark(self) -> SlowMark:
        return SlowMark(self, self.given)

    @torch.inference_mode()
    def do(self, until: int) -> None:
        while self.done < until:
            target, source, given = self._under_way.popleft()
            if self._is_host(source):
                assert torch.equal(source, given), "a buffer was written while it was being read"
                source.fill_(NONSENSE)
            else:
                target.copy_(given)
            self.done += 1

    def _is_host(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(each.data_ptr() <= begin < each.data_ptr() + max(1, each.nbytes) for each in self._host)


class SlowMark:
    def __init__(self, lane: SlowLane, until: int) -> None:
        self._lane = lane
        self._until = until

    def wait(self) -> None:
        self._lane.do(self._until)


def test_what_is_sent_arrives_and_one_call_behind_nobody_waits() -> None:
    lane = SlowLane()
    uploads = Uploads(lane, CPU)
    sent = []
    for number in range(5):
        given = [
            torch.arange(number + 1),
            torch.full((2, 3), number, dtype=torch.int32),
            torch.tensor([], dtype=torch.int64),
            torch.tensor([number / 2]),
        ]
        sent.append((given, uploads.send(given)))
        # Of the calls so far all are done but the last two.
        assert (lane.given, lane.done) == (number + 1, max(0, number - 1))
    lane.mark().wait()
    for given, got in sent:
        assert [each.dtype for each in got] == [each.dtype for each in given]
        assert all(torch.equal(one, other) for one, other in zip(given, got, strict=True))


def test_buffers_grow() -> None:
    uploads = Uploads(SlowLane(), CPU)
    for size in (1, 100_000, 10, 300_000, 200_000):
        (got,) = uploads.send([torch.arange(size)])
        assert torch.equal(got, torch.arange(size))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_is_fetched_is_read_when_it_is_there(late: int) -> None:
    """late: how many more calls there are before it is taken; the buffer of a call serves the second after it."""
    lane = SlowLane()
    downloads = Downloads(lane)
    pending = deque()
    for number in range(6):
        pending.append((number, downloads.fetch([torch.arange(number, number + 4), torch.tensor([number * 0.5])])))
        if len(pending) > late:
            first, download = pending.popleft()
            tokens, half = download.take()
            assert (tokens.tolist(), half.tolist()) == (list(range(first, first + 4)), [first * 0.5])


def test_a_lane_that_is_slow_finds_a_single_buffer_out() -> None:
    """The test's own teeth."""
    lane = SlowLane()
    buffer = lane.host_bytes(8)
    buffer.fill_(1)
    lane.copy(torch.empty(8, dtype=torch.uint8), buffer)
    buffer.fill_(2)
    with pytest.raises(AssertionError, match="written while it was being read"):
        lane.mark().wait()
