"""What a step of the model brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from model_runner.request import Chunk
from model_runner.sequence import Sequence


@dataclass(slots=True)
class Outcome:
    """The chunks to deliver, the sequences that are done, and by parent the new children.

    stuck: sequences whose form can't go on though it is not complete.
    """

    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    stuck: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
