"""What a client asks of the engine and what it gets back, as frozen dataclasses free of any wire format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_ADDITIVE_PENALTY = 2.0
"""Of presence_penalty and frequency_penalty, above or below 0."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 1024
MAX_CHOICES = 64
MAX_LENGTH_PENALTY = 10.0
"""Above or below 0."""
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_BYTES = 128
MAX_REQUEST_ID_BYTES = 128
MAX_TENANT_BYTES = 128
MAX_PRIORITY = 100
"""Of what a request caches."""
MAX_QUEUE_PRIORITY = 100
"""Of a request in line, above or below 0."""
MAX_PIN_SECONDS = 7 * 24 * 3600
MAX_FORM_BYTES = 64 * 1024
"""Of a schema, expression or grammar, and of all choices together."""
MAX_FORM_CHOICES = 1024


class FinishReason(Enum):
    """Why a choice ended: a stop token or string, the length limit, or Abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. temperature 0: the most likely. top_k 0, top_p 1, min_p 0: no filter.

    First come the penalties and biases, then what may not be drawn is left out, and filters apply in the order
    temperature, top_k, top_p, min_p. With a seed, the draw depends on nothing but the seed, the position in the
    sequence and the logits. bad_words: the token ids of each. allowed_token_ids None: all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a choice ends. max_tokens None: at the model's end or the longest sequence that fits.

    min_tokens: before so many, nothing ends it but max_tokens.
    """

    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_string: bool = False


class EarlyStopping(Enum):
    """When a beam search is done.

    HEURISTIC: when the best beam that runs scores no better, at its present length, than the worst finished one. FIRST:
    when `width` answers have finished. NEVER: when no beam that runs could beat the worst finished one.
    """

    HEURISTIC = "heuristic"
    FIRST = "first"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keeps the `width` likeliest answers. A score is the sum of log-probabilities over length ** length_penalty."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class StructureKind(Enum):
    """How the form of an answer is described."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that every answer has: `texts` has the schema, expression or grammar, or the choices, or nothing."""

    kind: StructureKind
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """How strongly and how long to keep what a request caches: blocks of a lower priority, 0 to MAX_PRIORITY, go first.

    pin_seconds: after the end, the full blocks of the prompt stay for so long.
    """

    priority: int = 0
    pin_seconds: float = 0.0


NO_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt and how to go on from it. logprobs None: none; else so many top candidates beside the chosen token.

    queue_priority: requests of a lower one run earlier, where the runner schedules by priority. skip_cache_read: finds
    nothing in the prefix cache; skip_cache_write: leaves nothing there. tenant: whom it is counted for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stop: StopConditions = StopConditions()
    num_choices: int = 1
    logprobs: int | None = None
    skip_cache_read: bool = False
    cache_salt: str = ""
    retention: Retention = NO_RETENTION
    queue_priority: int = 0
    prompt_logprobs: int | None = None
    best_of: int = 0
    beam_search: BeamSearch | None = None
    structured_output: StructuredOutput | None = None
    skip_cache_write: bool = False
    tenant: str = ""

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side at most."""
        return self.beam_search.width if self.beam_search is not None else max(self.best_of, self.num_choices)

    @property
    def is_best_of(self) -> bool:
        """Whether more answers are drawn than returned."""
        return self.best_of > self.num_choices


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Natural log-probabilities at one position, of the model's own logits: the chosen token's, and the top's."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Times are seconds; queue + prefill + decode = arrival to last token.

    Without a first token, the time of the end stands for it. pauses: times that its client had not read enough.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pauses: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The new tokens of one choice. `finish_reason` is set on a choice's last chunk, `usage` on the request's last.

    prompt_logprobs: on the first chunk, of the prompt's tokens from the second on. score: of a beam search or best_of.
    """

    request_id: str
    choice_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request as an operator sees it."""

    request_id: str
    running: bool
    prompt_tokens: int
    output_tokens: int
    age_seconds: float
    sequence_ids: tuple[str, ...]
    tenant: str = ""
    paused: bool = False
