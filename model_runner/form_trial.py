"""Trying a grammar in a process of its own, because a hostile one can keep the library busy without end.

`Trial` is this side of it; run as a module, this is the other side.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer

from model_runner.form_matcher import NO_TOKEN, Words, fault_of, open_matcher

TRIAL_SECONDS = 2.0
"""CPU time for one grammar: honest ones take milliseconds."""
STEP_SECONDS = 0.25
"""CPU time for the tokens that may follow at one place: honest grammars take a millisecond at most."""
TRIAL_STEPS = 48
TRIAL_MEMORY = 4 << 30
"""Address space of the process, in bytes."""


class Trial:
    """One process, started when it is first needed and after each grammar that it does not survive. Thread-safe."""

    def __init__(self, words: Words) -> None:
        self._lock = threading.Lock()
        self._vocabulary = json.dumps(
            {"tokens": [token.decode("latin-1") for token in words.tokens], "eos": words.special_token_ids}
        )
        self._process: subprocess.Popen[str] | None = None

    def fault_of(self, grammar: str) -> str:
        """Why the grammar is refused; empty when it is good. Blocks while others are tried."""
        with self._lock:
            # The one of last time may have been ended by somebody else since.
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            answer = _ask(self._process, grammar)
            return _fate(self._process.wait()) if answer is None else answer

    def close(self) -> None:
        """Ends the process. A later fault_of() would start another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _start(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C is for the server, and when that ends, so does its end of the pipe.
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        _write_line(process, self._vocabulary)
        return process


def _ask(process: subprocess.Popen[str], grammar: str) -> str | None:
    """What the process says of the grammar; None when it ends instead."""
    assert process.stdout is not None
    try:
        _write_line(process, json.dumps(grammar))
    except BrokenPipeError:
        return None
    answer = process.stdout.readline()
    return str(json.loads(answer)) if answer else None


def _write_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _fate(returncode: int) -> str:
    if returncode == -signal.SIGPROF:
        return f"it takes more than {TRIAL_SECONDS:.0f} seconds to compile"
    return f"it takes more than {TRIAL_MEMORY >> 30} GiB of memory, or more than the library can bear"


def _serve() -> None:
    # Not every system can limit it.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY, TRIAL_MEMORY))
    vocabulary: dict[str, Any] = json.loads(sys.stdin.readline())
    words = Words([token.encode("latin-1") for token in vocabulary["tokens"]], vocabulary["eos"])
    tokenizer = words.tokenizer()
    for line in sys.stdin:
        # Nobody handles the signal: it ends the process wherever it is.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)
        answer = _fault(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _fault(tokenizer: LLTokenizer, grammar: str) -> str:
    """What is wrong with the grammar itself, or with the places that a random answer comes to."""
    matcher = open_matcher(tokenizer, grammar)
    chance = random.Random(0)
    for step in range(TRIAL_STEPS):
        if matcher.is_stopped():
            break
        started = time.process_time()
        mask = matcher.compute_bitmask()
        if time.process_time() - started > STEP_SECONDS:
            return f"it takes more than {STEP_SECONDS} seconds to say what may follow its first {step} tokens"
        token_id = None if matcher.is_error() else _any_allowed(mask, chance)
        if token_id is None:
            break
        matcher.consume_token(token_id)
    fault = fault_of(matcher)
    # A model that lacks a token for some place of the form can still write another text of it.
    return "" if fault == NO_TOKEN else fault


def _any_allowed(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens in a mask, from a random place on."""
    start = chance.randrange(len(mask))
    for place in (*range(start, len(mask)), *range(start)):
        if mask[place]:
            bits = [bit for bit in range(8) if mask[place] >> bit & 1]
            return place * 8 + bits[chance.randrange(len(bits))]
    return None


if __name__ == "__main__":
    _serve()
