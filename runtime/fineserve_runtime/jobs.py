"""A request on its way through the runtime, and its observers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from fineserve_runtime.engines.api import Logprobs, Sampling, Submission, TokenChunk

Handover = Literal["exchange", "recompute"]
"""How requests go on when layers are dropped: their KV goes to the pipeline, or it computes that again (regroup.py)."""


class End(NamedTuple):
    """How a request ended. ``finished``: with ``reason`` stop or length. ``refused``: no engine ever started it. ``failed``: it
    was under way. ``aborted``: its client left. ``reason`` is a word for machines, ``message`` a sentence for people;
    ``retry_after_s`` says when to come back, where that is known; ``vector`` is the answer of a model that embeds."""

    kind: Literal["finished", "refused", "failed", "aborted"]
    reason: str
    message: str = ""
    retry_after_s: float | None = None
    vector: tuple[float, ...] = ()


class Limits(NamedTuple):
    """What a request is to keep: seconds to its first token, by which schedulers go, and seconds per token after it, which
    are counted only; None: no limit."""

    ttft_s: float
    tpot_s: float | None = None


class Refused(RuntimeError):
    """The driver takes no such request now; ``reason`` is a word for machines, ``retry_after_s`` as in ``End``."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Sink(Protocol):
    """Waits for the tokens of one request. Calls come from engine threads and must return at once. ``last``: the end of the
    request is told next, at once."""

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None: ...

    def ended(self, end: End) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """A request of ``model`` with its prompt, in the driver's hands until it ends.

    ``slo_s`` is its TTFT limit, ``tpot_slo_s`` its limit of the time per token. ``engine`` is where it is now,
    None while it waits and when it ended. ``served_by`` is where it was dispatched last; ``unproven``: that engine has not
    given it a token yet. ``trace`` is the client's ``traceparent``. ``waited_s`` is how long the request took from its client
    to the driver. For ``held_s`` of that time an operator moved its model; deadlines count from the end of the move. Times are
    seconds since the driver started.
    """

    id: int
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    sink: Sink
    slo_s: float
    priority: int = 0
    tpot_slo_s: float | None = None
    trace: str | None = None
    waited_s: float = 0.0
    held_s: float = 0.0
    arrival_s: float = 0.0
    queued_s: float = 0.0
    engine: int | None = None
    served_by: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    generated: list[int] = field(default_factory=list)
    preemptions: int = 0
    retried: bool = False
    unproven: bool = True

    @property
    def due_from_s(self) -> float:
        """The moment from which its TTFT limit runs for schedulers. Metrics count from ``arrival_s``."""
        return self.arrival_s + self.held_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first so far; None before the second."""
        if self.first_token_s is None or self.last_token_s is None or len(self.generated) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.generated) - 1)

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and of the output so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def can_resume(self) -> bool:
        """Whether another engine can go on after the tokens generated so far as if nothing had happened. A seeded generator,
        penalties on the output, words that begin in it and constraints would start anew."""
        sampling = self.sampling
        anew = (
            sampling.seed is not None
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.bad_words_token_ids
            or sampling.constraint
        )
        return not (self.generated and anew)

    def submission(self) -> Submission:
        """The work of an engine: the prompt with all tokens generated before, and the rest of the output."""
        done = len(self.generated)
        sampling = replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - done,
            min_tokens=max(0, self.sampling.min_tokens - done),
            prompt_logprobs=None if done else self.sampling.prompt_logprobs,
        )
        return Submission(self.id, (*self.prompt, *self.generated), sampling, self.priority)


class Observer(Protocol):
    """Counts requests. Calls come one at a time, from any thread."""

    def arrived(self, job: Job) -> None: ...

    def dispatched(self, job: Job, now: float) -> None: ...

    def emitted(self, job: Job, tokens: int, now: float) -> None:
        """Tokens came; called before the job's own times are set."""
        ...

    def preempted(self, job: Job) -> None: ...

    def ended(self, job: Job, end: End, now: float) -> None: ...


def finish_end(chunk: TokenChunk) -> End:
    """The end that an engine reports with a request's last chunk; with a ``problem`` the request itself is wrong."""
    reason = chunk.finish_reason
    if chunk.problem:
        return End("refused", "rejected", chunk.problem)
    if reason in ("stop", "length"):
        return End("finished", reason, vector=chunk.vector)
    if reason == "abort":
        return End("aborted", "abort", "the request was aborted")
    return End("failed", "engine_error", "the engine could not go on with this request")
