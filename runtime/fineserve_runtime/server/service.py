"""What the server's endpoints work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from fineserve_runtime.driver import Driver
from fineserve_runtime.jobs import Limits, Refused
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.server.errors import ApiError, refused
from fineserve_runtime.server.streams import Choice, Order
from fineserve_runtime.server.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedName:
    """A model as clients see it."""

    id: str
    tokenizer: Tokenizer
    vocab_tokens: int
    max_model_len: int
    limits: Limits


@dataclass(slots=True)
class Service:
    """``api_key`` None: everybody may come. ``log`` writes a structured line."""

    driver: Driver
    metrics: Metrics
    models: Mapping[str, ServedName]
    api_key: str | None = None
    log: Callable[[str, Mapping[str, object]], None] = lambda event, facts: None
    versions: Mapping[str, str] = field(default_factory=dict)

    def model(self, name: str) -> ServedName:
        """Raises ApiError for a model that is not served."""
        if name in self.models:
            return self.models[name]
        close = get_close_matches(name, self.models, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"served are {', '.join(self.models)}"
        raise ApiError(404, f"the model {name!r} does not exist; {hint}", param="model", code="model_not_found")

    def choose(self, orders: list[Order]) -> list[Choice]:
        """Submit all orders, or none. Raises ApiError when one is not taken."""
        choices: list[Choice] = []
        try:
            for order in orders:
                choices.append(Choice(self.driver, self.models[order.model].tokenizer, order))  # noqa: PERF401
        except Refused as problem:
            for choice in choices:
                choice.abort()
            self.metrics.turned_away(orders[0].model, problem.reason, orders[0].limits)
            raise refused(problem) from None
        return choices
