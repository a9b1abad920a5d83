"""The engine's thread: takes requests in, runs step after step, and hands chunks out.

A step: schedule, with the books' word for the blocks; run the model; sample; free what finished; deliver. Where that
can be done, the next step is scheduled and launched before the last one has landed (flights.py). Requests enter between
steps, and leave while none is in flight. While the KV manager is away, steps go on as long as they need nothing of it.
When the books themselves are lost, nothing fails either: every sequence goes back in line, and is computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import structlog

from model_runner.admission import SearchRoom
from model_runner.books import BOOKS_TROUBLE, BooksRefused, BooksTaken, KvBooks
from model_runner.constraint import Constraint
from model_runner.drafting import Drafter
from model_runner.endings import Endings
from model_runner.engine_types import (
    Delivery,
    EngineOptions,
    EngineState,
    Executor,
    FailureKind,
    StateListener,
)
from model_runner.flights import Flights
from model_runner.generation import Generation
from model_runner.intake import Intake
from model_runner.observer import EngineObserver, SilentObserver, StepReport
from model_runner.outcome import Outcome
from model_runner.progress import ToldProgress
from model_runner.request import GenerateRequest, RequestView
from model_runner.scheduler import Scheduler
from model_runner.sequence import LiveRequest
from model_runner.sequence import Sequence as LiveSequence
from model_runner.step_clock import StepClock
from model_runner.step_plan import StepPlan
from model_runner.steps import InlineSteps, Steps, WorkerSteps
from model_runner.timed_books import TimedBooks
from model_runner.token_text import Tokenizer

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.25
"""Between two attempts to reach the KV manager."""
HEARTBEAT_SECONDS = 1.0
"""Between two looks at whether the KV manager is still there, while nothing is asked of it."""
STARVED_SECONDS = 0.1
"""Before the first in line is tried again while nothing runs: others hold the blocks of our pool."""
STALLED_SECONDS = 0.02
"""Before a step is tried again when all that run wait for the KV manager's word."""
MAX_LOSSES = 3
"""Times in a row that the books may be lost before one step succeeds; then the requests at hand are failed."""


class Engine:
    """One model, one pool, one thread. submit(), abort(), requests() and counts() may be called from any thread.

    deliver() gets all chunks of a step at once, in the engine's thread; on_state() each change of state with a
    sentence. Both must be quick and must not raise.
    """

    def __init__(
        self,
        executor: Executor,
        books: KvBooks,
        tokenizer: Tokenizer,
        options: EngineOptions,
        deliver: Delivery,
        on_state: StateListener = lambda state, sentence: None,
        observer: EngineObserver | None = None,
        steps: Steps | None = None,
    ) -> None:
        """steps: where steps run; by default on a thread of their own with async_steps, else on the engine's."""
        self._steps = steps or (WorkerSteps if options.async_steps else InlineSteps)(executor)
        self._books = TimedBooks(books)
        self._clock = StepClock(self._books)
        self._options = options
        self._deliver = deliver
        self._on_state = on_state
        self._observer = observer or SilentObserver()
        self._scheduler = Scheduler(self._books, options.limits)
        self._drafter = Drafter(self._books, options.limits, options.max_sequence_tokens)
        self._generation = Generation(
            tokenizer,
            options.eos_token_ids,
            options.max_sequence_tokens,
            self._observer,
            SearchRoom(options.facts.num_blocks - 1, options.facts.block_size),
        )
        # A guess needs the tokens before it.
        runs_ahead = options.async_steps and not options.limits.speculative_tokens
        self._flights = Flights(self._steps, self._generation, runs_ahead=runs_ahead)
        self._state = EngineState.WAITING_FOR_BOOKS
        self._has_books = False
        self._losses = 0
        self._progress = ToldProgress(lambda: (self._generation.generated_tokens, self._scheduler.preemptions))
        self._intake = Intake(options.max_queued_requests, options.max_queued_tokens)
        self._endings = Endings(self._scheduler, self._intake, self._observer, deliver, self._lose_books)
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # For callers.

    def start(self) -> None:
        """Starts the thread, which opens the pool as soon as the KV manager answers."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every live request with a failure, gives the pool back and ends the thread."""
        self._intake.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def state(self) -> EngineState:
        return self._state

    def submit(self, request: GenerateRequest, constraint: Constraint | None = None) -> LiveRequest:
        """Takes in a validated request and returns the handle to cancel it by.

        constraint: the request's structured_output, compiled, at its beginning. Raises DuplicateRequest, QueueFull,
        EngineStopped.
        """
        live = LiveRequest(request, arrived_at=time.monotonic(), constraint=constraint)
        live.sequences.append(self._generation.first_sequence(live))
        self._intake.submit(live)
        return live

    def check_room(self, ahead: int) -> None:
        """Raises QueueFull when there is no room for one more behind `ahead` that are yet to be submitted."""
        self._intake.check_room(ahead)

    def cancel(self, live: LiveRequest) -> None:
        """Ends this request before the next step, and never a later one of the same id."""
        self._intake.cancel(live)

    def throttle(self, live: LiveRequest, paused: bool) -> None:
        """Pauses a request before the next step, or lets it go on: a paused one gives its blocks back and waits."""
        self._intake.throttle(live, paused)

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Ends requests before the next step. Returns how many were live, and how many unknown."""
        return self._intake.abort(request_ids)

    def requests(self) -> list[RequestView]:
        """The live requests, oldest first."""
        return self._intake.views()

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return self._intake.counts()

    # The thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            # Also if the handling of a fault fails: nobody must go on waiting for a thread that has ended.
            self._shut_down()

    def _turn(self) -> bool:
        """One turn of the loop; false when the engine is to stop."""
        try:
            if self._take_in():
                return False
            if not self._has_books:
                self._open_books()
                return True
            worked = self._step()
            self._show_books()
            if not worked:
                self._wait()
        except BOOKS_TROUBLE as error:
            self._lose_books(error)
        except Exception as error:
            log.exception("engine step failed")
            # What is in flight goes on from the step that failed.
            self._abandon_flights()
            self._endings.fail_at_hand(error)
        return True

    def _take_in(self) -> bool:
        """Takes in what arrived and what was aborted; true when the engine is to stop."""
        if self._flights and self._intake.interrupts:
            # Nobody gives back blocks that a step in flight may write.
            self._land_all()
        news = self._intake.take(flying=bool(self._flights))
        for live in news.arrived:
            self._scheduler.add(live.sequences[0])
        self._endings.abort(news.aborted)
        for live, paused in news.throttled:
            self._throttle_now(live, paused)
        return news.stopping

    def _throttle_now(self, live: LiveRequest, paused: bool) -> None:
        # Between its being asked for and now, the request may have been aborted, or asked for the same twice.
        if paused == live.paused or not self._intake.is_live(live):
            return
        live.paused = paused
        if not paused:
            self._scheduler.resume(live.sequences)
            return
        live.pauses += 1
        try:
            self._scheduler.pause(live.sequences)
        except BOOKS_TROUBLE as error:
            # Who else is to pause must not be forgotten for it.
            self._lose_books(error)

    def _wait(self) -> None:
        """Sleeps until something arrives; with a line that nobody serves, only for a moment.

        When nothing has arrived, sees whether the KV manager is still there: operators look at health while idle.
        """
        if not self._intake.wait(self._patience()):
            self._books.flush()

    def _patience(self) -> float:
        """Seconds to sleep when there is nothing to compute and nothing arrives."""
        if self._scheduler.running:
            return STALLED_SECONDS
        if self._scheduler.waiting:
            return STARVED_SECONDS
        return RETRY_SECONDS if self._books.away else HEARTBEAT_SECONDS

    def _step(self) -> bool:
        """One step planned, and one done; false when there was neither."""
        try:
            return self._compute()
        finally:
            self._progress.tell(self._observer)
            # Last, and also if the step fails: their other choices may be in it.
            refused = self._scheduler.take_refused()
            if refused:
                self._ground()
            for sequence, error in refused:
                self._endings.refuse(sequence.live, error)

    def _compute(self) -> bool:
        """Launches the next step, then lands the one before it; and the next one too, unless it runs ahead."""
        started = time.monotonic()
        flying = bool(self._flights)
        if flying:
            self._clock.go_on()
        else:
            self._clock.start()
        plan = self._scheduler.schedule(flying=flying)
        if not plan.must_land:
            self._drafter.draft(plan)
            self._books.flush()
        self._clock.lap("schedule")
        if plan.work:
            self._intake.note_admissions([work.sequence.live for work in plan.work], started)
            self._launch(plan)
        if flying:
            self._land()
        if self._flights.must_land:
            self._land()
        return flying or bool(plan.work)

    def _launch(self, plan: StepPlan) -> None:
        try:
            self._flights.launch(plan)
        except Exception:
            # The step before is sound, and may end some whom this one's failure would end otherwise.
            self._ground()
            raise

    def _land(self) -> None:
        """Waits for the first step in flight, and takes and delivers what it brings."""
        flight, result = self._flights.wait()
        self._clock.lap("forward")
        already = self._generation.generated_tokens
        outcome = self._flights.land(flight, result, time.monotonic())
        self._settle(outcome, [each for each in flight.drawing if not flight.runs_ahead and each.told_too_much])
        self._clock.lap("deliver")
        self._losses = 0
        self._observer.on_step(
            StepReport(
                phases=self._clock.phases(),
                prefill_tokens=flight.plan.prefill_tokens,
                generated_tokens=self._generation.generated_tokens - already,
                preemptions=flight.plan.preemptions,
                sequences=len(flight.plan.work),
            )
        )
        self._clock.start()

    def _land_all(self) -> None:
        """Lands what is in flight, so that blocks may be given back. Raises what a step does."""
        while self._flights:
            self._clock.go_on()
            self._land()

    def _ground(self) -> None:
        """_land_all() for the paths that must not raise: a step that fails is of no use, nor is one behind it."""
        while self._flights:
            try:
                self._land_all()
            except BOOKS_TROUBLE as error:
                # What has landed was delivered; whoever calls next hears of the books.
                log.warning("the books fail while steps land", reason=str(error))
            except Exception:
                log.exception("a step in flight failed")
                self._abandon_flights()

    def _abandon_flights(self) -> None:
        """Drops what is in flight: it waits until nothing is, and the ends that waited for it come about."""
        ends = self._flights.abandon()
        try:
            self._settle(ends, [])
        except BOOKS_TROUBLE as error:
            log.warning("the books fail while requests end", reason=str(error))

    def _settle(self, outcome: Outcome, mistold: list[LiveSequence]) -> None:
        """Tells the books of wrong guesses, forks and ends, then delivers.

        Who sees a last chunk finds the blocks given back. mistold: sequences whose guesses were told, and are wrong.
        """
        with ExitStack() as always:
            # Whatever the books answer: in the end the chunks go out, and before that the ended sequences end.
            always.callback(self._endings.end_stuck, outcome.stuck)
            always.callback(self._deliver, outcome.chunks)
            always.callback(self._progress.tell, self._observer)
            always.callback(self._endings.close, outcome.chunks)
            always.callback(self._clock.lap, "sample")
            always.callback(self._endings.finish, outcome.finished)
            forks = [(parent, [each for each in family if not each.finish_reason]) for parent, family in outcome.forks]
            if forks := [(parent, children) for parent, children in forks if children]:
                self._scheduler.fork(forks)
            for sequence in mistold:
                self._books.truncate(sequence.sequence_id, sequence.computed)
                sequence.take_back(self._options.limits.block_size)

    # When things go wrong.

    def _open_books(self) -> None:
        try:
            self._books.open(self._options.facts)
        except BooksTaken:
            raise
        except BOOKS_TROUBLE as error:
            refused = isinstance(error, BooksRefused)
            self._change_state(EngineState.REFUSED if refused else EngineState.WAITING_FOR_BOOKS, str(error))
            self._intake.wait(RETRY_SECONDS, for_news=False)
            return
        self._has_books = True
        self._show_books()

    def _show_books(self) -> None:
        """Tells whether the KV manager answers; while it is away, what runs goes on, and nobody new is let in."""
        away = self._books.away
        if away:
            self._change_state(EngineState.WAITING_FOR_BOOKS, away)
        else:
            self._change_state(EngineState.SERVING, "the KV manager keeps the books")

    def _lose_books(self, error: Exception) -> None:
        """Everybody goes back in line until the books answer again; unless they are somebody else's by now."""
        self._has_books = False
        self._ground()
        self._scheduler.reset()
        if isinstance(error, BooksTaken):
            self._give_up(error)
            return
        self._losses += 1
        if self._losses > MAX_LOSSES and isinstance(error, BooksRefused):
            self._losses = 0
            self._endings.fail_at_hand(error)
        self._change_state(EngineState.WAITING_FOR_BOOKS, str(error))

    def _give_up(self, error: BooksTaken) -> None:
        """Ends the engine: two runners that took a pool from each other in turns would both serve nobody."""
        self._change_state(EngineState.TAKEN, str(error))
        self._intake.stop()
        self._endings.fail(
            self._intake.all(), f"this runner has lost its KV pool to another one: {error}", FailureKind.ELSEWHERE
        )

    def _shut_down(self) -> None:
        self._ground()
        self._endings.stop()
        self._books.close()
        self._steps.close()
        self._change_state(EngineState.STOPPED, "stopped")

    def _change_state(self, state: EngineState, sentence: str) -> None:
        if state is not self._state:
            self._state = state
            self._on_state(state, sentence)
