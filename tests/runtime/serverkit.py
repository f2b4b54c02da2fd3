"""A real server on a real port over fake engines, and a tokenizer of bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.core import CoreSpec
from fineserve_runtime.jobs import Limits, Observer
from fineserve_runtime.metrics import EngineFigures, Metrics
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.service import Key, Service
from fineserve_runtime.server.serving import DrainingServer, Tls, bind
from runtimekit import HANGS_S, Runtime, core_spec, eventually, runtime


class ByteTokenizer:
    """Token = byte + 2; 0 and 1 are marks without text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [byte + 2 for byte in text.encode()]

    longest_token = 4

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        if max(token_ids, default=0) >= 2**32:
            raise OverflowError("number too large to fit in target type")  # as real ones do
        return bytes(token - 2 for token in token_ids if 2 <= token < 258).decode(errors="replace")

    def chat(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if messages[0]["role"] == "untemplated":
            raise ValueError("the model has no chat template; use /v1/completions")
        if options.get("reasoning_effort"):
            messages = [{"role": "effort", "content": options["reasoning_effort"]}, *messages]
        return "".join(f"[{each['role']}] {each['content']}\n" for each in messages)


@dataclass
class Served:
    url: str
    runtime: Runtime
    service: Service
    server: DrainingServer
    logged: list[tuple[str, Mapping[str, object]]]

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=HANGS_S)

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


@contextmanager
def listening(service: Service, drain_s: float = 5, tls: Tls | None = None) -> Iterator[tuple[str, DrainingServer]]:
    """The service on a port of its own: its address."""
    server, bound = DrainingServer(service, drain_s, tls), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"{'https' if tls else 'http'}://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()
        service.close()
        bound.close()


@contextmanager
def served(
    spec: CoreSpec | None = None,
    *,
    step_s: float | None = 0.0005,
    bounds: Bounds | None = None,
    keys: tuple[Key, ...] = (),
    limits: HttpLimits | None = None,
    admin_secret: str | None = None,
    drain_s: float = 5,
    observers: Sequence[Observer] = (),
    tls: Tls | None = None,
    **changes: object,
) -> Iterator[Served]:
    spec = spec or core_spec()
    names = [model.id for model in spec.models]
    metrics = Metrics(names)
    with runtime(
        spec, bounds=bounds, step_s=step_s, observers=(metrics, *observers), on_incident=metrics.incident, **changes
    ) as here:
        metrics.registry.register(EngineFigures(here.hosts, metrics.live, here.driver.health))
        models = {
            model.id: ServedName(
                model.id, ByteTokenizer(), 258, 512, Limits(model.slo_s), embeds=bool(changes.get("embeds"))
            )
            for model in spec.models
        }
        logged: list[tuple[str, Mapping[str, object]]] = []
        service = Service(
            here.driver,
            metrics,
            models,
            keys,
            lambda event, facts: logged.append((event, facts)),
            limits=limits or HttpLimits(),
            admin_secret=admin_secret,
        )
        with listening(service, drain_s, tls) as (url, server):
            yield Served(url, here, service, server, logged)
