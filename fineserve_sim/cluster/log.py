"""The decision log: events and commands of the policy core, and spans that say what engines computed, as JSON-able dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Lane
from fineserve_sim.policy.commands import Command
from fineserve_sim.policy.events import Event

Log = Callable[[dict[str, object]], None]


class DecisionLog:
    """Writes to ``log``, a line a call."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def told(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The controller was told of an event, and answered with these commands."""
        for kind, message in (("event", event), *(("command", command) for command in commands)):
            fields = {name: plain(value) for name, value in message._asdict().items()}
            self._log({"now_s": now, kind: type(message).__name__, **fields})

    def launched(self, engine: Engine, lane: Lane, now: float) -> None:
        """A batch begins: log the limits that keep requests waiting in the engine's queue, and the requests that start."""
        state = engine.state()
        self._span(
            now,
            "EngineLaunched",
            engine=engine.index,
            waiting=engine.waiting,
            free_slots=max(0, state.free_slots + engine.waiting),
            free_kv_tokens=state.free_kv_tokens,
            prefill_tokens=sum(size for _, _, size in lane.chunks),
            starts=[sequence.index for sequence, done, _ in lane.chunks if not done],
        )

    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, iterations: int, column: int) -> None:
        """A batch was computed, or a span of alike ones. ``engine`` is the column of the timeline; ``slowdown`` is the factor
        at the end by which neighbours on the GPU slow it."""
        self._span(
            since_s,
            "EngineComputed",
            engine=column,
            seconds=now - since_s,
            iterations=iterations,
            slowdown=engine.slowdown,
            decodes=lane.decodes.size if lane.decoding else 0,
            prefill_tokens=sum(size for _, _, size in lane.chunks),
        )

    def preempted(self, engine: Engine, request: int, now: float) -> None:
        """A request lost its KV memory and waits in the engine's queue again."""
        self._span(now, "Preempted", engine=engine.columns[0], request=request)

    def fetched(self, engine: Engine, request: int, tokens: int, began_s: float, now: float) -> None:
        """So many tokens of a request's prefix have come from host memory."""
        self._span(began_s, "Fetched", engine=engine.columns[0], request=request, tokens=tokens, seconds=now - began_s)

    def transferred(self, what: str, engine: int, columns: list[int], began_s: float, now: float) -> None:
        """KV or weights of an engine over several instances have arrived."""
        self._span(now, "Transferred", what=what, engine=engine, engines=columns, seconds=now - began_s)

    def _span(self, now_s: float, span: str, **fields: object) -> None:
        self._log({"now_s": now_s, "span": span, **fields})


def plain(value: object) -> object:
    """A field of an event or command as JSON-able values."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value
