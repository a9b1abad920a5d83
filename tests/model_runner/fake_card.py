"""A GPU that is not there: tensors that say they are on cuda:0, and hold their numbers on the CPU.

While a Card is entered, all that torch is told about cuda:0 goes by it, and it is as strict as CUDA, or stricter:

- An operation takes tensors of one place, but for CPU tensors without dimensions. A kernel takes tensors of the card.
- Who reads numbers of the card on the host waits until the device has done all its work, and so does torch where a
  result's size depends on them, and where memory is copied that is not page-locked. Under nobody_waits() that is an
  error.
- A copy from or to page-locked memory is under way until somebody waits for an event behind it. Till then what is
  copied must stay as it is, and where it is copied to is nonsense.
- It counts the bytes of its tensors, those that are temporary within one operation excepted.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
NONSENSE = 0xA5
_aten = torch.ops.aten
_SIZE_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READS = {
    "repeat_interleave.self_Tensor",
    "is_nonzero.default",
    "where.default",
    "argwhere.default",
    "tensor_split.tensor",
}
"""Operations made of others, some of which read: in inference mode they come whole."""
_PRODUCTS = {"linear.default", "mm.default", "addmm.default", "bmm.default"}
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA_NUMBER, _META_NUMBER, _NUM_TYPES = 1, 14, 22


def why_not() -> str | None:
    """Why there can be no such card here; None when there can."""
    if torch.version.cuda is not None:
        return "this torch has CUDA of its own"
    return (
        None if sys.platform == "linux" else "only Linux's torch is known to have its guards where they are looked for"
    )


class Waits(AssertionError):
    """The host waits for the device where it must not."""


class MixedDevices(AssertionError):
    """An operation takes tensors of both places."""


class CardTensor(Tensor):
    """A tensor of the card; its numbers are in `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> CardTensor:
        # A view of an ordinary tensor must be one, also in inference mode.
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=CARD,
            )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} on a tensor of a card that has been left")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"CardTensor({self.held!r})"


class Card(TorchDispatchMode):
    """Enter it; the thread that does is the one that sees it."""

    def __init__(self, total_bytes: int = 1 << 34) -> None:
        super().__init__()
        self._total_bytes = total_bytes
        self._pinned: dict[int, Tensor] = {}
        self._under_way: deque[tuple[Tensor, Tensor, bool]] = deque()
        self._given = self._done = 0
        self._products = self._products_done = 0
        self._may_wait = True
        self.uploads: list[tuple[tuple[int, ...], torch.dtype, bool]] = []
        """Of all copies from the host: what was copied, and whether nobody waited for it."""
        self._owners: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.bytes = self.most_bytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Card:
        with ExitStack() as stack:
            stack.enter_context(_guard_for_cuda())
            for name, stand_in in self._stand_ins().items():
                stack.enter_context(mock.patch(f"torch.cuda.{name}", stand_in))
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextmanager
    def nobody_waits(self) -> Iterator[None]:
        """Within it the host may wait for nothing but copies that no product of matrices is before, or one that may be
        waited for."""
        before, self._may_wait = self._may_wait, False
        try:
            yield
        finally:
            self._may_wait = before

    @property
    def moment(self) -> int:
        """Products of matrices so far."""
        return self._products

    def may_wait_for(self, moment: int) -> None:
        """From now on the host may always wait for what was before."""
        self._products_done = max(self._products_done, moment)

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function on numbers as a kernel: all tensors that it is given must be on the card, and its result is."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and not isinstance(each, CardTensor):
                    raise MixedDevices(f"a kernel gets a tensor of the host, {tuple(each.shape)}")
            return tree_map(self._wrapped, self._computed(function, args, kwargs))

        return launch

    def _computed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operation of the card, on the CPU."""
        return function(*_held(args), **_held(kwargs))

    def _stand_ins(self) -> dict[str, Any]:
        """By name what takes the place of torch.cuda's."""
        card = self

        class Event:
            def record(self, stream: object) -> None:
                self._until, self._products = card._given, card._products

            def synchronize(self) -> None:
                card._wait_for(self._until, self._products)

        class Device:
            def __init__(self, device: torch.device) -> None:
                assert device == CARD

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: object) -> None:
                pass

        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "Event": Event,
            "device": Device,
            "current_stream": lambda device=None: None,
            "synchronize": lambda device=None: self._wait("a synchronisation"),
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (self._total_bytes - self.bytes, self._total_bytes),
            "memory_reserved": lambda device=None: self.bytes,
            "max_memory_reserved": lambda device=None: self.most_bytes,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "most_bytes", self.bytes),
        }

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if name in ("pin_memory", "_pin_memory"):
            return self._register(args[0].clone())
        if name == "is_pinned":
            return self._is_pinned(args[0])
        leaves = tree_leaves((args, kwargs))
        devices = [each for each in leaves if isinstance(each, torch.device)]
        is_new = devices[0].type == "cuda" if devices else any(isinstance(each, CardTensor) for each in leaves)
        is_copy = name in ("copy_", "_to_copy", "to")
        if is_copy and isinstance(args[0], CardTensor) != (
            isinstance(args[1], CardTensor) if name == "copy_" else is_new
        ):
            return self._transfer(function, name, args, kwargs, is_new)
        self._check(function, args, leaves)
        self._products += is_new and is_product(function)
        if kwargs.get("pin_memory"):
            return self._register(function(*args, **kwargs | {"pin_memory": False}))
        own = {id(each.held): each for each in leaves if isinstance(each, CardTensor)}
        if not is_new:
            return function(*_held(args), **_held(kwargs))
        made = self._computed(function, args, kwargs)
        return tree_map(lambda each: own.get(id(each)) if id(each) in own else self._wrapped(each), made)

    def _check(self, function: Any, args: Any, leaves: list[Any]) -> None:
        """What CUDA would refuse, or wait for."""
        on_card = [each for each in leaves if isinstance(each, CardTensor)]
        if not on_card:
            return
        for each in leaves:
            if isinstance(each, Tensor) and not isinstance(each, CardTensor) and each.dim():
                raise MixedDevices(f"{function} gets a tensor of the host, {tuple(each.shape)}, beside the card's")
        name = f"{function._schema.name.removeprefix('aten::')}.{function._overloadname}"
        if name.startswith(("index.", "index_put", "_index_put")):
            is_mask = any(each.dtype in (torch.bool, torch.uint8) for each in tree_leaves(args[1]) if each is not None)
            if is_mask:
                self._wait(f"{name} by a mask")
        elif name in _READS or _SIZE_DEPENDS & set(function.tags):
            self._wait(name)

    def _transfer(self, function: Any, name: str, args: Any, kwargs: Any, is_new: bool) -> Any:
        """A copy between the two."""
        is_put = name == "copy_"
        target, source = args[:2] if is_put else (None, args[0])
        is_upload = not isinstance(source, CardTensor)
        host = source if is_upload else target
        non_blocking = kwargs.get("non_blocking", False) or any(each is True for each in args[1:])
        is_awaited = host is None or not (non_blocking and self._is_pinned(host))
        if is_upload:
            self.uploads.append((tuple(host.shape), host.dtype, not is_awaited))
        if is_awaited:
            self._wait(f"{name} {'from' if is_upload else 'to'} memory that is not page-locked, or that is waited for")
        copied = function(*_held(args), **_held(kwargs))
        if not is_put:
            copied = self._wrapped(copied.clone() if copied is source else copied) if is_new else copied
        if not is_awaited:
            self._given += 1
            self._under_way.append((host, host.clone(), is_upload))
            if not is_upload:
                host.view(torch.uint8).fill_(NONSENSE)
        return target if is_put else copied

    def _wait(self, why: str) -> None:
        """The host waits for all that the device was given."""
        if not self._may_wait:
            raise Waits(f"the host waits for {why}")
        self._wait_for(self._given, self._products)

    @torch.inference_mode()
    def _wait_for(self, until: int, products: int) -> None:
        if not self._may_wait and products > self._products_done:
            raise Waits("the host waits for an event behind the step's products")
        self._products_done = max(self._products_done, products)
        while self._done < until:
            host, given, is_upload = self._under_way.popleft()
            if is_upload:
                assert torch.equal(host, given), "page-locked memory was written while it was being copied"
            else:
                host.copy_(given)
            self._done += 1

    def _register(self, tensor: Tensor) -> Tensor:
        # Kept, so that its place is nobody else's.
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _wrapped(self, made: Any) -> Any:
        if not isinstance(made, Tensor):
            return made
        wrapped = CardTensor(made)
        place, size = made.untyped_storage().data_ptr(), made.untyped_storage().nbytes()
        if size:
            self._owners[place] += 1
            if self._owners[place] == 1:
                self._sizes[place] = size
                self._take(place, size)
            weakref.finalize(wrapped, self._release, place)
        return wrapped

    def _release(self, place: int) -> None:
        self._owners[place] -= 1
        if not self._owners[place]:
            self._give(place, self._sizes.pop(place))

    def _take(self, place: int, size: int) -> None:
        """Counts memory that a tensor at this address gets."""
        self.bytes += size
        self.most_bytes = max(self.most_bytes, self.bytes)

    def _give(self, place: int, size: int) -> None:
        """Counts what it gives back."""
        self.bytes -= size


def is_product(function: Any) -> bool:
    """Whether an operation is a product of matrices."""
    schema = getattr(function, "_schema", None)
    return schema is not None and f"{schema.name.removeprefix('aten::')}.{function._overloadname}" in _PRODUCTS


def _held(values: Any) -> Any:
    """The same with what the card holds, on the CPU."""

    def held(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CPU
        return value.held if isinstance(value, CardTensor) else value

    return tree_map(held, values)


@contextmanager
def _guard_for_cuda() -> Iterator[None]:
    """torch's build for CPUs has nothing that makes a GPU current; meanwhile it has meta's, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_TYPES).in_dll(library, _GUARDS)
    before, guards[_CUDA_NUMBER] = guards[_CUDA_NUMBER], guards[_META_NUMBER]
    lifts_all = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        guards[_CUDA_NUMBER] = before
        torch._C._set_only_lift_cpu_tensors(lifts_all)
