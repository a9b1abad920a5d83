"""What the tests of the CPU kernels share: the instruction sets of this CPU, and threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from model_runner import native

LIBRARY = native.library()
INTEGER_SETS = LIBRARY.instruction_sets if LIBRARY else []
"""All of them: each has products of whole numbers of its own."""
INSTRUCTION_SETS = [name for name in INTEGER_SETS if not name.endswith(("vnni", "dot", "bf16"))]
"""Those with float32 arithmetic of their own."""
PAIR_SETS = [name for name in INTEGER_SETS if name.endswith("bf16")]
"""Those with products of pairs of bfloat16."""


@contextmanager
def using(instruction_set: str | None = None, threads: int | None = None) -> Iterator[None]:
    """The library with another instruction set or number of threads, for what is made and run inside."""
    library = native.need_library()
    before = library.instruction_set, library.threads
    library.use(instruction_set or before[0])
    library.set_threads(threads or before[1])
    try:
        yield
    finally:
        library.use(before[0])
        library.set_threads(before[1])
