"""What the server's endpoints work with."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol, TypeVar

from fineserve_runtime.config import AddedModel
from fineserve_runtime.driver import Driver
from fineserve_runtime.jobs import Refused
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.server.errors import ApiError, refused
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.streams import Choice, Order
from fineserve_runtime.twin import Twin

T = TypeVar("T")

_FRONT_THREADS = 2


@dataclass(frozen=True, slots=True)
class Key:
    """An API key: at most ``requests`` at a time (None: no limit); only those with ``priority`` may set one."""

    name: str
    secret: str
    requests: int | None = None
    priority: bool = True


class ModelRoster(Protocol):
    """Adds and removes models; calls take seconds. They raise ValueError for what cannot be and RuntimeError for what did
    not work."""

    def add(self, name: str, model: AddedModel) -> ServedName: ...

    def remove(self, name: str) -> None: ...

    def check_moves(self, to: Mapping[str, int]) -> None:
        """Raises ValueError where a model cannot be moved to its device."""
        ...

    def move(self, name: str, gpu: int) -> None: ...


class Moving(Exception):
    """The model of a request is on its way to another device; the request may come again when it is there."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(model)


@dataclass(slots=True)
class Service:
    """Without ``keys`` everybody may come; without ``admin_secret`` there are no admin endpoints. ``log`` writes a structured
    line.

    Work leaves the event loop: ``front`` threads read bodies, tokenise and submit; ``quick`` ones do what only waits for the
    driver's lock; ``admin`` what operators ask for.
    """

    driver: Driver
    metrics: Metrics
    models: dict[str, ServedName]
    keys: tuple[Key, ...] = ()
    log: Callable[[str, Mapping[str, object]], None] = lambda event, facts: None
    versions: Mapping[str, str] = field(default_factory=dict)
    limits: HttpLimits = field(default_factory=HttpLimits)
    admin_secret: str | None = None
    roster: ModelRoster | None = None
    twin: Twin | None = None
    moving: set[str] = field(default_factory=set)
    _front: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_FRONT_THREADS, "front"))
    _quick: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quick"))
    _admin: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "admin"))
    _busy: Counter[str] = field(default_factory=Counter)

    def close(self) -> None:
        """Let the threads end. The driver comes first: an operator's thread may wait for an engine that starts."""
        self.driver.close()
        self._front.shutdown()
        self._quick.shutdown()
        self._admin.shutdown()

    # --- threads ---------------------------------------------------------------------------------------------------

    async def work(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._front, function)

    async def look(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._quick, function)

    async def operate(self, function: Callable[[], T]) -> T:
        """One operator at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._admin, function)

    def later(self, function: Callable[[int], None], request_id: int) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped, and the driver ends all requests
            self._quick.submit(function, request_id)

    # --- keys ------------------------------------------------------------------------------------------------------

    def key(self, given: str) -> Key | None:
        """The key with this secret, found in a time that tells nothing."""
        found = None
        for key in self.keys:
            if hmac.compare_digest(given.encode(), key.secret.encode()):
                found = key
        return found

    def may_administrate(self, given: str) -> bool:
        secret = self.admin_secret
        return secret is not None and hmac.compare_digest(given.encode(), secret.encode())

    @contextmanager
    def within_limits(self, key: Key | None) -> Iterator[None]:
        """For as long as a request of the key lasts. Raises ApiError when it has too many. Event loop only."""
        if key is None or key.requests is None:
            yield
            return
        if self._busy[key.name] >= key.requests:
            problem = f"the key {key.name} has {key.requests} requests under way, which is its limit"
            raise ApiError(429, problem, code="rate_limit_exceeded", reason="key_limit", retry_after_s=1.0)
        self._busy[key.name] += 1
        try:
            yield
        finally:
            self._busy[key.name] -= 1

    # --- models ----------------------------------------------------------------------------------------------------

    def model(self, name: str) -> ServedName:
        """Raises ApiError for a model that is not served."""
        if name in self.models:
            return self.models[name]
        close = get_close_matches(name[:100], self.models, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"served are {', '.join(self.models)}"
        raise ApiError(404, f"the model {name[:100]!r} does not exist; {hint}", param="model", code="model_not_found")

    def choose(self, orders: list[Order], loop: asyncio.AbstractEventLoop) -> list[Choice]:
        """Submit all orders, which are for one model, or none. Raises ApiError when one is not taken, and
        Moving when it may be taken later."""
        choices: list[Choice] = []
        tokenizer = self.model(orders[0].model).tokenizer
        try:
            for order in orders:
                choice = Choice(self.driver, tokenizer, order, loop, self.later)
                choices.append(choice)
        except Refused as problem:
            for choice in choices:
                choice.abort()
            if orders[0].model in self.moving:
                raise Moving(orders[0].model) from None
            self.metrics.turned_away(orders[0].model, problem.reason, orders[0].limits)
            raise refused(problem) from None
        return choices
