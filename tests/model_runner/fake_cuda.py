"""A card that is not there with streams, events, graphs and an end of its memory, where torch's own classes are C++.

torch.cuda.graph, torch.cuda.stream and torch.cuda.device are the real ones; what they call is played, and each call is
bound to the signature of what it plays. A CudaCard is a Card, and beside that:

- Work is in the order of its stream alone. Who touches what another stream has written, and has not waited for it, is
  found out.
- A graph is captured on a stream that is not the default one. Till its end the host waits for nothing, and all work is
  on that stream. What it computed is nonsense until a replay, which repeats each operation with the tensors that it
  had: what Python does around them is not repeated.
- What a graph allocates is its pool's, from which graphs that share it take by turns. A pool ends with its last graph.
- A tensor for which there is no memory is an OutOfMemoryError.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.model_runner.fake_card import CARD, Card, CardTensor, is_product

Call = tuple[Callable[..., Any], Any, Any, Any]


class Unordered(AssertionError):
    """A stream touches what another one has written, and has not waited for it."""


class NotForCapture(AssertionError):
    """What CUDA refuses while a graph is captured, or to capture."""


def like(real: Any) -> Callable[[type], type]:
    """Binds each call of a class's public methods to those of a class of torch's."""

    def wrap(kind: type) -> type:
        for name, method in vars(kind).items():
            if callable(method) and not name.startswith("_"):
                setattr(kind, name, bound(getattr(real, name), method))
        made = inspect.signature(getattr(real, "__new__"))  # noqa: B009 - a type's own is another thing
        setattr(kind, "__init__", _bound(made, kind.__init__))  # type: ignore[misc]  # noqa: B010
        return kind

    return wrap


def bound(real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in, whose calls must be such that the real function takes them."""
    return _bound(inspect.signature(real), stand_in)


def _bound(signature: inspect.Signature, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return stand_in(*args, **kwargs)

    return call


class Pool:
    """Memory of graphs: most: what it has of the card, which stays."""

    def __init__(self) -> None:
        self.used = self.most = self.graphs = 0


class CudaCard(Card):
    """Enter it; one thread sees it."""

    def __init__(self, total_bytes: int = 1 << 34) -> None:
        super().__init__(total_bytes)
        self.default = _State(0)
        self.streams: list[_State] = [self.default]
        self.current = self.default
        self.capturing: Any = None
        self.pools: dict[tuple[int, int], Pool] = {}
        self.replays = 0
        self._written: dict[int, tuple[_State, int]] = {}
        self._pool_of: dict[int, Pool] = {}

    @property
    def reserved(self) -> int:
        """What torch would have taken from the card."""
        return self.bytes + sum(pool.most for pool in self.pools.values())

    def _stand_ins(self) -> dict[str, Any]:
        stand_ins = super()._stand_ins()
        for name in ("device", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "mem_get_info"):
            del stand_ins[name]
        stand_ins |= {
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_reserved": lambda device=None: self.most_bytes,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "most_bytes", self.reserved),
            "mem_get_info": lambda device=None: (self._total_bytes - self.reserved, self._total_bytes),
            "current_device": lambda: CARD.index,
            "set_device": lambda device: None,
            "current_stream": lambda device=None: self.current.made,
            "set_stream": lambda stream: setattr(self, "current", stream.state),
            "graph_pool_handle": self._new_pool,
        }
        del stand_ins["Event"]
        stand_ins = {name: bound(getattr(torch.cuda, name), each) for name, each in stand_ins.items()}
        kinds = _kinds_of(self)
        self.default.made = kinds["Stream"]._of(self.default)
        # Undocumented, and called by the real classes: the index of the device that was current.
        exchanges = {name: lambda index: CARD.index for name in ("_exchange_device", "_maybe_exchange_device")}
        return stand_ins | exchanges | kinds

    def __enter__(self) -> CudaCard:
        super().__enter__()
        self._stack.enter_context(mock.patch.object(torch._C, "_host_emptyCache", create=True))
        # A stream of another card, which a test before this one had.
        self._stack.enter_context(mock.patch.object(torch.cuda.graph, "default_capture_stream", None))
        return self

    def _new_pool(self) -> tuple[int, int]:
        handle = (0, len(self.pools) + 1)
        self.pools[handle] = Pool()
        return handle

    def _computed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._check_order(_on_card((args, kwargs)))
        made = super()._computed(function, args, kwargs)
        touched = [each for each in tree_leaves((args, kwargs)) if isinstance(each, CardTensor)]
        self._note_writes([each.held for each in touched if _is_written(function, each, args, kwargs)])
        if self.capturing is not None:
            held_args, held_kwargs = torch.utils._pytree.tree_map(_numbers, (args, kwargs))
            self.capturing._calls.append((function, held_args, held_kwargs, made))
        return made

    def _transfer(self, function: Any, name: str, args: Any, kwargs: Any, is_new: bool) -> Any:
        if self.capturing is not None:
            raise NotForCapture("a graph would copy from or to the host")
        self._check_order(_on_card((args, kwargs)))
        made = super()._transfer(function, name, args, kwargs, is_new)
        self._note_writes(_on_card(made))
        return made

    def _wait(self, why: str) -> None:
        if self.capturing is not None:
            raise NotForCapture(f"the host waits for {why} while a graph is captured")
        super()._wait(why)
        for stream in self.streams:
            stream.done = stream.time

    def _check_order(self, touched: list[Tensor]) -> None:
        now = self.current
        if self.capturing is not None and now is not self.capturing._stream:
            raise NotForCapture("work on another stream than the one that is captured")
        now.time += 1
        for each in touched:
            stream, when = self._written.get(_place(each), (now, 0))
            if stream is not now and max(now.waited.get(stream, 0), stream.done) < when:
                raise Unordered(f"stream {now.number} touches what stream {stream.number} has written")

    def _note_writes(self, tensors: list[Tensor]) -> None:
        if self.capturing is not None:
            # A graph's own work is that of the stream which replays it.
            return
        for each in tensors:
            self._written[_place(each)] = (self.current, self.current.time)

    def _take(self, place: int, size: int) -> None:
        self._written.pop(place, None)
        if self.capturing is not None:
            pool = self._pool_of[place] = self.capturing._pool
            pool.used += size
            pool.most = max(pool.most, pool.used)
        else:
            self.bytes += size
            self._written[place] = (self.current, self.current.time)
        if self.reserved > self._total_bytes:
            self._give(place, size)
            free = self._total_bytes - self.reserved
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes, and {free} are free.")
        self.most_bytes = max(self.most_bytes, self.reserved)

    def _give(self, place: int, size: int) -> None:
        self._written.pop(place, None)
        pool = self._pool_of.pop(place, None)
        if pool is None:
            self.bytes -= size
        else:
            pool.used -= size


class _State:
    """Of a stream: time counts its work; waited: of other streams, what it has waited for; done: what the host has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.time = self.done = 0
        self.waited: dict[_State, int] = {}
        self.made: Any = None

    def moment(self) -> dict[_State, int]:
        return {**self.waited, self: self.time}

    def wait_for(self, moment: dict[_State, int]) -> None:
        for stream, when in moment.items():
            self.waited[stream] = max(when, self.waited.get(stream, 0))


def _kinds_of(card: CudaCard) -> dict[str, Any]:
    """The classes of a card, by their names in torch.cuda."""
    numbers = count(1)

    @like(torch.cuda.Event)
    class Event:
        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            state = card.current if stream is None else stream.state
            self._moment = state.moment()
            self._until, self._products = card._given, card._products

        def wait(self, stream: Any = None) -> None:
            (card.current if stream is None else stream.state).wait_for(self._moment)

        def synchronize(self) -> None:
            if card.capturing is not None:
                raise NotForCapture("the host waits for an event while a graph is captured")
            card._wait_for(self._until, self._products)
            for stream, when in self._moment.items():
                stream.done = max(stream.done, when)

    @like(torch.cuda.Stream)
    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            self.device = CARD
            self.state = _State(next(numbers))
            self.state.made = self
            card.streams.append(self.state)

        @classmethod
        def _of(cls, state: _State) -> Any:
            stream = cls.__new__(cls)
            stream.device, stream.state = CARD, state
            return stream

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

    @like(torch.cuda.CUDAGraph)
    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._calls: list[Call] = []
            self._pool: Pool | None = None

        def capture_begin(
            self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
        ) -> None:
            if card.current is card.default:
                raise NotForCapture("graphs must be captured on a stream that is not the default one")
            if card.capturing is not None or self._pool is not None:
                raise NotForCapture("a graph is captured once, and one at a time")
            self._pool = card.pools[card._new_pool() if pool is None else pool]
            self._pool.graphs += 1
            weakref.finalize(self, _leave, self._pool)
            self._stream, card.capturing = card.current, self

        def capture_end(self) -> None:
            assert card.capturing is self
            card.capturing = None
            if card.current is not self._stream:
                raise NotForCapture("a graph ends on another stream than it began on")
            for _, args, kwargs, made in self._calls:
                given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
                for each in tree_leaves(made):
                    if isinstance(each, Tensor) and each.is_floating_point() and _place(each) not in given:
                        each.fill_(torch.nan)

        def replay(self) -> None:
            if self._pool is None or card.capturing is not None:
                raise NotForCapture("there is nothing to replay, or a graph is being captured")
            card.replays += 1
            card._products += sum(is_product(function) for function, *_ in self._calls)
            for function, args, kwargs, before in self._calls:
                card._check_order([each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)])
                made = function(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(made), strict=True):
                    if isinstance(old, Tensor):
                        card._note_writes([old])
                        if old.data_ptr() != new.data_ptr():
                            old.copy_(new)

    return {"Event": Event, "Stream": Stream, "CUDAGraph": CUDAGraph}


def _leave(pool: Pool) -> None:
    pool.graphs -= 1
    if not pool.graphs:
        pool.most = pool.used


def _on_card(values: Any) -> list[Tensor]:
    """The numbers of all tensors of the card."""
    return [each.held for each in tree_leaves(values) if isinstance(each, CardTensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, CardTensor) else value


def _is_written(function: Any, tensor: CardTensor, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes to a tensor that it was given; a kernel may write to any."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return True
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    return any(
        given.get(each.name) is tensor and each.alias_info is not None and each.alias_info.is_write
        for each in schema.arguments
    )
