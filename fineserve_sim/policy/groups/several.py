"""The controller of several models whose engines prefill, decode, or do both, side by side on GPUs that they share.

A request goes to an engine of its model that prefills. When its prompt is computed there (``PrefillEnded``), it goes on at an
engine of its model that decodes. Engines stay where they are, so nothing else is decided. ``roles.py`` has the theory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy import events
from fineserve_sim.policy.commands import Command, Dispatch, Migrate, Reject
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.groups.dispatch import DispatchPolicy, GroupEngine
from fineserve_sim.policy.groups.roles import decode_router
from fineserve_sim.policy.interfaces import EngineLoad


@dataclass(frozen=True, slots=True)
class RoleModel:
    """A model and its engines. ``max_tokens`` bounds a sequence. Where no engine is there to ``decode``, the others do both."""

    id: str
    max_tokens: int
    block_tokens: int
    prefill: Sequence[GroupEngine]
    decode: Sequence[GroupEngine] = ()


class RolesController(Controller):
    """Dispatches prompts among the engines that prefill, by a policy of each model that ``dispatch`` makes. A prefilled request
    goes to the engine of role *decode* with the most free KV memory."""

    stays = "engines with roles stay, and queue their requests themselves"
    needs_loads = True

    def __init__(self, models: Sequence[RoleModel], dispatch: Callable[[], DispatchPolicy]) -> None:
        super().__init__({model.id: () for model in models})
        self._models = {model.id: model for model in models}
        self._prefill = {model.id: _Choice(dispatch(), model.prefill, model.block_tokens) for model in models}
        self._decode = {model.id: _Choice(decode_router(), model.decode, model.block_tokens) for model in models}
        self._model_of = {engine.id: model.id for model in models for engine in model.prefill}
        self._moving: set[int] = set()  # requests, until ``MigrationEnded``
        self._handlers |= {
            events.Loads: lambda event: self._note(event.loads),
            events.PrefillEnded: self._prefill_ended,
            events.MigrationEnded: self._moved,
        }

    def _arrive(self, event: events.RequestArrived | events.RequestReturned) -> list[Command]:
        request = self._expected(event)
        model, tokens = self._models[request.model], request.prompt_tokens
        if not model.prefill:
            return [Reject(request.id, f"no instance of {model.id} is placed", unplaced=True)]
        if tokens >= model.max_tokens:
            return [
                Reject(
                    request.id, f"prompt of {tokens} tokens; the longest that fits has {max(0, model.max_tokens - 1)}"
                )
            ]
        return [Dispatch(request.id, self._prefill[model.id].pick(tokens))]

    def _prefill_ended(self, event: events.PrefillEnded) -> list[Command]:
        model = self._model_of.get(event.engine)
        if model is None or not self._models[model].decode:
            raise ValueError(f"a prefill ends at engine {event.engine}, which hands nothing over: that cannot be")
        if event.request_id in self._moving:
            raise ValueError(f"request {event.request_id} is prefilled already: that cannot be")
        self._moving.add(event.request_id)
        return [Migrate(event.request_id, event.engine, self._decode[model].pick(event.tokens))]

    def _moved(self, event: events.MigrationEnded) -> list[Command]:
        if event.request_id not in self._moving:
            raise ValueError(f"request {event.request_id} was not to migrate")
        self._moving.remove(event.request_id)
        return []

    def _note(self, loads: Mapping[int, EngineLoad]) -> list[Command]:
        for choices in (self._prefill, self._decode):
            for choice in choices.values():
                choice.note(loads)
        return []


class _Choice:
    """The engines of one model and role, and the policy that chooses among them."""

    def __init__(self, router: DispatchPolicy, engines: Sequence[GroupEngine], block_tokens: int) -> None:
        self._router, self._block_tokens = router, block_tokens
        self._engines = {engine.id: engine for engine in engines}
        for engine in engines:
            router.offer(engine)

    def note(self, loads: Mapping[int, EngineLoad]) -> None:
        for id, load in loads.items():
            if engine := self._engines.get(id):
                self._load(engine, load)

    def pick(self, tokens: int) -> int:
        """The engine that the policy chooses, or the first that holds so many tokens and one more. Its load has the prompt
        until it is told again."""
        chosen = self._router.choose()
        assert chosen is not None
        engine = self._engines[chosen]
        if tokens >= engine.holds_tokens:
            engine = next(other for other in self._engines.values() if tokens < other.holds_tokens)
        self._load(engine, engine.promised(tokens, self._block_tokens))
        return engine.id

    def _load(self, engine: GroupEngine, load: EngineLoad) -> None:
        engine.load = load
        self._router.offer(engine)
