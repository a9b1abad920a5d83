"""What the engine tells of itself while it works; `services` turns it into metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from model_runner.request import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Where the seconds of a step went; they add up to its wall time.

    kv: waiting for the KV manager, in whatever phase. sample: draws, text, stop conditions. deliver: forgetting what
    ended, and handing the chunks over; the event loop sends them while the next step runs.
    """

    schedule: float
    kv: float
    forward: float
    sample: float
    deliver: float

    @property
    def total(self) -> float:
        return self.schedule + self.kv + self.forward + self.sample + self.deliver


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step. Tokens computed for prompts (recomputed ones included) and generated."""

    phases: PhaseSeconds
    prefill_tokens: int
    generated_tokens: int
    preemptions: int
    sequences: int


class EngineObserver(Protocol):
    """Called from the engine's thread; must be quick and must not raise."""

    def on_step(self, report: StepReport) -> None:
        """After each step that ran the model."""
        ...

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        """What has come about since the last call, in steps that failed as well: the sums are those of all usages."""
        ...

    def on_first_token(self, seconds: float) -> None:
        """When a request gets its first token: seconds since its arrival (TTFT)."""
        ...

    def on_next_token(self, seconds: float) -> None:
        """When a choice gets a later token: seconds since its token before (inter-token latency)."""
        ...

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        """When a request ends; None when it failed. End-to-end seconds are the sum of the usage's times."""
        ...


class SilentObserver:
    """An observer that does nothing."""

    def on_step(self, report: StepReport) -> None:
        pass

    def on_progress(self, generated_tokens: int, preemptions: int) -> None:
        pass

    def on_first_token(self, seconds: float) -> None:
        pass

    def on_next_token(self, seconds: float) -> None:
        pass

    def on_finish(self, reason: FinishReason | None, usage: Usage, tenant: str) -> None:
        pass
