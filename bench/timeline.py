"""A decode step and what the KV manager does meanwhile: how long each part takes, as numbers and as a picture.

    python -m bench.timeline --out docs/step.png

One engine with the demo's model decodes so many streams; its books are a KV manager in a process of its own. Medians of
the steps in which all streams decode. A message goes out when a step is scheduled, and what it asks for is needed two
steps later.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from bench.sidecar import kv_manager
from bench.turns import LoadMeter
from model_runner.engine import Engine
from model_runner.engine_types import Failure
from model_runner.observer import PhaseSeconds, SilentObserver, StepReport
from model_runner.request import Chunk, GenerateRequest, StopConditions
from services.config import ModelRunnerSettings, load_settings
from services.logging import configure_logging
from services.model_setup import Setup, set_up_model
from services.session.dial import SessionDial
from services.session.session import SilentWatch
from services.session_books import SessionBooks

BLOCK_SIZE = 16
PROMPT_TOKENS = range(17, 33)
PHASES = tuple(field.name for field in fields(PhaseSeconds))
COLOURS = {"schedule": "#4c78a8", "kv": "#e45756", "forward": "#bab0ac", "sample": "#72b7b2", "deliver": "#54a24b"}
ZOOM_MS = 1.5
"""How much of the step's beginning the second picture shows, beyond the round trip, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Medians in milliseconds; round_trip_ms is from a message's sending to its answer's arrival."""

    phases_ms: dict[str, float]
    round_trip_ms: float
    waited_steps: int
    steps: int

    @property
    def step_ms(self) -> float:
        return sum(self.phases_ms.values())


class Recorder(SilentObserver, SilentWatch):
    """Keeps what the engine and its session tell, from the first step on in which all streams decode."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self.ended = threading.Semaphore(0)
        self.steps: list[PhaseSeconds] = []
        self.round_trips: list[float] = []
        self.waits = 0

    def on_step(self, report: StepReport) -> None:
        if report.generated_tokens == self._streams and not report.prefill_tokens:
            self.steps.append(report.phases)

    def on_round_trip(self, seconds: float) -> None:
        if self.steps:
            self.round_trips.append(seconds)

    def on_wait(self, seconds: float) -> None:
        self.waits += bool(self.steps)

    def take(self, items: Sequence[Chunk | Failure]) -> None:
        """Chunks go nowhere."""
        for item in items:
            if isinstance(item, Failure) or item.usage is not None:
                self.ended.release()


def measure(streams: int, num_tokens: int) -> Timeline:
    """Decodes `num_tokens` tokens of each stream."""
    setup = _set_up(streams, num_tokens)
    recorder = Recorder(streams)
    with kv_manager() as address:
        books = SessionBooks(SessionDial(address), lease_blocks=streams, watch=recorder)
        engine = Engine(setup.executor, books, setup.tokenizer, setup.options, recorder.take, observer=recorder)
        engine.start()
        try:
            _submit(engine, streams, num_tokens)
            for _ in range(streams):
                recorder.ended.acquire()
        finally:
            engine.stop()
    return _timeline(recorder)


def _set_up(streams: int, num_tokens: int) -> Setup:
    blocks = streams * (-(-(PROMPT_TOKENS[-1] + num_tokens) // BLOCK_SIZE) + 2) + 2 * streams
    given = {"num_blocks": blocks, "block_size": BLOCK_SIZE, "max_sequences": streams, "log_format": "json"}
    return set_up_model(load_settings(ModelRunnerSettings, given))


def _submit(engine: Engine, streams: int, num_tokens: int) -> None:
    rng = Random(5)
    for number in range(streams):
        prompt = tuple(rng.choices(range(1000), k=PROMPT_TOKENS[number % len(PROMPT_TOKENS)]))
        stop = StopConditions(max_tokens=num_tokens, ignore_eos=True)
        engine.submit(GenerateRequest(f"r{number}", prompt, stop=stop))


def _timeline(recorder: Recorder) -> Timeline:
    steps = recorder.steps
    phases = {name: 1000 * statistics.median(getattr(step, name) for step in steps) for name in PHASES}
    return Timeline(phases, 1000 * statistics.median(recorder.round_trips), recorder.waits, len(steps))


def draw(timeline: Timeline, streams: int, out: Path) -> None:
    """Writes the picture: the whole step, and its beginning."""
    # Imported late: the numbers alone need no picture.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(9, 4.2), dpi=120)
    sent = timeline.phases_ms["schedule"] + timeline.phases_ms["kv"]
    for axes, until in zip(panels, (1.02 * timeline.step_ms, sent + timeline.round_trip_ms + ZOOM_MS), strict=True):
        start = 0.0
        for name in ("schedule", "kv", "forward", "sample", "deliver"):
            width = timeline.phases_ms[name]
            axes.barh(1, width, left=start, height=0.6, color=COLOURS[name], label=f"{name} {width:.2f} ms")
            start += width
        label = f"message until its answer is there {timeline.round_trip_ms:.2f} ms"
        axes.barh(0, timeline.round_trip_ms, left=sent, height=0.6, color="#f2cf5b", label=label)
        axes.set_yticks([1, 0], ["engine", "round trip"])
        axes.set_xlim(0, until)
    panels[0].set_title(f"One decode step of {streams} streams: all of it", fontsize=10, loc="left")
    panels[1].set_title("Its beginning", fontsize=10, loc="left")
    panels[1].set_xlabel("ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=7)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(out)


def main(
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 128,
    out: Annotated[Path | None, typer.Option(help="PNG file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures the parts of a decode step, and draws them."""
    configure_logging("warning")
    meter = LoadMeter()
    timeline = measure(streams, tokens)
    load = meter.read()
    if out is not None:
        draw(timeline, streams, out)
    figures = {**timeline.phases_ms, "step": timeline.step_ms, "round_trip": timeline.round_trip_ms}
    figures |= {"waited_share": timeline.waited_steps / timeline.steps}
    if as_json:
        typer.echo(json.dumps(figures | load.figures()))
        return
    typer.echo(str(load))
    for name, value in figures.items():
        typer.echo(f"{name:>14} {value:9.3f}{'' if name == 'waited_share' else ' ms'}")


if __name__ == "__main__":
    typer.run(main)
