"""The proof: what is wrong with the outcomes of the load and with the pools at the end, sentence by sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from model_runner.request import Chunk, FinishReason
from services.soak.load import Ending, Kind, Request

NOT_TAKEN = frozenset({"NOT_READY", "STOPPING"})
"""Words of a runner that has not taken a request."""


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times in seconds of the run's clock; code, reason, sentence: of the error, if any."""

    request: Request
    runner: int
    started: float
    ended: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    code: str = ""
    reason: str = ""
    sentence: str = ""

    def take(self, chunk: Chunk) -> None:
        """Notes what came."""
        self.tokens.setdefault(chunk.choice_index, []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finished[chunk.choice_index] = chunk.finish_reason

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(map(len, self.tokens.values()))

    @property
    def is_complete(self) -> bool:
        """Whether all choices came to their ends."""
        return len(self.finished) == self.request.choices and not self.code


@dataclass(frozen=True, slots=True)
class Answer:
    """What the undisturbed run said to a prompt.

    sure: tokens before the first one whose runner-up was so close that the last bits of a sum decide between them.
    """

    tokens: tuple[int, ...]
    sure: int


@dataclass(frozen=True, slots=True)
class Truth:
    """What the undisturbed run said to each prompt.

    searches: the answers of its beam search, best first; empty where the last bits of a sum may depend on what else is
    computed, for a search hangs on far more ties than an answer that is drawn.
    """

    answers: Sequence[Answer]
    searches: Sequence[Sequence[tuple[int, ...]]] = ()

    def of(self, request: Request, choice: int) -> Answer | None:
        """What a choice of a request must be; None when that is not known."""
        if request.kind is not Kind.BEAMS:
            return self.answers[request.prompt]
        if not self.searches:
            return None
        tokens = self.searches[request.prompt][choice]
        return Answer(tokens, len(tokens))


@dataclass(frozen=True, slots=True)
class Outage:
    """A runner that was dead, or else stopped, from one moment of the run's clock to another."""

    runner: int
    began: float
    ended: float
    dead: bool = True


@dataclass(frozen=True, slots=True)
class PoolEnd:
    """A pool when everything has ended. Counts are in blocks but for sequences and requests.

    runner_lease: what the runner says that it has at hand. violations: those of check().
    """

    pool: str
    usable: int
    free: int
    cached: int
    held: int
    leased: int
    sequences: int
    requests: int
    runner_lease: int
    violations: tuple[str, ...] = ()


def faults_of(outcomes: Sequence[Outcome], truth: Truth, outages: Sequence[Outage]) -> list[str]:
    """What is wrong with the outcomes."""
    found = [f"{each.request.name}: {sentence}" for each in outcomes for sentence in _faults(each, truth, outages)]
    if not any(outcome.is_complete for outcome in outcomes):
        found.append("no request was completed, so nothing is proved")
    return found


def pool_faults(end: PoolEnd) -> list[str]:
    """What is wrong with a pool in which nothing should be held but a lease."""
    return [f"pool {end.pool}: {sentence}" for sentence in _pool_faults(end)]


def _faults(outcome: Outcome, truth: Truth, outages: Sequence[Outage]) -> Iterator[str]:
    if outcome.ended is None:
        yield f"the stream hangs, with {outcome.num_tokens} tokens"
        return
    yield from _wrong_tokens(outcome, truth)
    if outcome.code:
        if not _is_excused(outcome, outcome.ended, outages):
            when = f"{outcome.num_tokens} tokens, from {outcome.started:.1f} to {outcome.ended:.1f} s"
            yield f"ended with {outcome.code} ({outcome.reason or 'no reason'}) after {when}: {outcome.sentence}"
        return
    yield from _wrong_ends(outcome)


def _wrong_tokens(outcome: Outcome, truth: Truth) -> Iterator[str]:
    for choice, tokens in outcome.tokens.items():
        answer = truth.of(outcome.request, choice)
        right = answer.tokens[: min(len(tokens), answer.sure)] if answer else ()
        if tuple(tokens[: len(right)]) != right:
            place = next(index for index, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1])
            yield f"choice {choice} has token {tokens[place]} at {place}, undisturbed it was {right[place]}"
        if len(tokens) > outcome.request.max_tokens:
            yield f"choice {choice} has {len(tokens)} tokens, {outcome.request.max_tokens} were asked for"


def _wrong_ends(outcome: Outcome) -> Iterator[str]:
    request = outcome.request
    if request.ending is Ending.DROP:
        return
    for choice in range(request.choices):
        reason = outcome.finished.get(choice)
        length = len(outcome.tokens.get(choice, ()))
        if reason is None:
            yield f"choice {choice} has no end"
        elif reason is FinishReason.LENGTH and length != request.max_tokens:
            yield f"choice {choice} ended with {length} tokens of {request.max_tokens}"
        elif reason is not FinishReason.LENGTH and (reason is not FinishReason.ABORT or request.ending != Ending.ABORT):
            yield f"choice {choice} ended by {reason.value}"


def _is_excused(outcome: Outcome, ended: float, outages: Sequence[Outage]) -> bool:
    """Whether an error is what the faults explain: that of a dead runner, or of one that has not taken the request."""
    if outcome.code == "DEADLINE_EXCEEDED":
        return outcome.request.ending is Ending.DEADLINE
    if outcome.code != "UNAVAILABLE":
        return False
    if outcome.reason in NOT_TAKEN and not outcome.tokens:
        return True
    return any(
        outage.runner == outcome.runner
        and outage.began <= ended
        and outcome.started <= outage.ended
        and (outage.dead or not outcome.tokens)
        for outage in outages
    )


def _pool_faults(end: PoolEnd) -> Iterator[str]:
    yield from end.violations
    if end.requests:
        yield f"{end.requests} requests are still listed"
    if end.sequences:
        yield f"{end.sequences} sequences are still live"
    if end.held != end.leased:
        yield f"{end.held} blocks are held, and {end.leased} are leased"
    if end.leased != end.runner_lease:
        yield f"{end.leased} blocks are leased, and the runner has {end.runner_lease}"
    if end.free + end.cached + end.held != end.usable:
        yield f"{end.free} free, {end.cached} cached and {end.held} held blocks are not {end.usable}"


def count_ends(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """How many requests ended how."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        end = outcome.code or ("completed" if outcome.is_complete else "cut short")
        counts[end] = counts.get(end, 0) + 1
    return counts
