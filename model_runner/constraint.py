"""What ties the tokens of an answer to a form, as the sampler and the generation see it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The state of one choice's form after the tokens it has so far."""

    def mask(self) -> NDArray[np.uint32]:
        """The tokens that may come next: bit i % 32 of word i // 32 is set for token i; [ceil(V / 32)]."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes a token, which the mask must have allowed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text so far has the form; more may follow."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the form is complete and nothing may follow but the end."""
        ...

    @property
    def failure(self) -> str:
        """Why no token may follow though the form is not complete; empty while all is well."""
        ...

    def copy(self) -> Constraint:
        """The same state, for another choice to go on from."""
        ...
