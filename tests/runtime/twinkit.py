"""A server with a twin, from a file of the demo's two models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fineserve_runtime.config import RuntimeFile
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_runtime.logs import EventLog
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.serve import _service, served_scenario
from fineserve_runtime.server.service import Service
from fineserve_runtime.server.text import Tokenizer
from fineserve_runtime.twin import Memory, Twin
from runtimekit import HANGS_S, eventually
from serverkit import listening

ROOT = {"authorization": "Bearer root"}
NAMES = ("tiny-bf16", "tiny-fp8")
TWO = [
    ("cluster.count", "2"),
    (
        "systems",
        "[{base: fineserve, name: f, placement: {policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[1]]}}}]",
    ),
]
SWAPPED = {"tiny-bf16": [[1]], "tiny-fp8": [[0]]}


class Here:
    def __init__(self, url: str, running: Running, service: Service, alarms: list[tuple[str, dict[str, Any]]]) -> None:
        self.url, self.running, self.service, self.alarms = url, running, service, alarms

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=ROOT, timeout=HANGS_S)

    def load(self, requests: int = 40, models: Sequence[str] = NAMES) -> list[str]:
        """Texts of requests of several lengths, for the models in turn, some side by side."""
        texts = [""] * requests

        def ask(number: int) -> None:
            body = {
                "model": models[number % len(models)],
                "prompt": "x" * (20 + 7 * number),
                "max_tokens": 8 + number % 9,
            }
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=HANGS_S)
            texts[number] = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

        for first in range(0, requests, 8):
            threads = [
                threading.Thread(target=ask, args=(number,)) for number in range(first, min(first + 8, requests))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return texts


@contextmanager
def serving_twin(
    file: RuntimeFile, tokenizer: Callable[[Path], Tokenizer], start: StartHost | None = None
) -> Iterator[Here]:
    """The file names ROOT_KEY as the operators' key, which is root."""
    scenario = served_scenario(file, None)
    memory = Memory({model.id: number for number, model in enumerate(scenario.models)})
    metrics, log, alarms = Metrics(NAMES), EventLog(), list[tuple[str, dict[str, Any]]]()

    def incident(what: str, facts: dict[str, Any]) -> None:
        metrics.incident(what, facts)
        alarms.append((what, facts))

    with launch(file, scenario, observers=(metrics, memory), start=start) as running:
        memory.hear(running)
        service = _service(file, scenario, running, metrics, log, tokenizer, {})
        service.twin = Twin(file, scenario, running, memory, metrics.twin, incident)
        service.twin.niceness = 0  # beside other tests the lowest priority would get no time at all
        with listening(service) as (url, _):
            yield Here(url, running, service, alarms)
    log.close()


def trade_places(here: Here) -> tuple[httpx.Response, list[tuple[str, int, str]]]:
    """A plan that swaps the models is carried out under load: the answer, and the clients' (model, status, text)."""
    twin = here.service.twin
    assert twin is not None
    twin.ask = lambda question: {"plan": {"systems": [{"placement": {"groups": SWAPPED}}]}}  # type: ignore[method-assign]
    texts, stop = list[tuple[str, int, str]](), threading.Event()

    def client(model: str) -> None:
        while not stop.is_set():
            body = {"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0}
            answer = httpx.post(f"{here.url}/v1/completions", json=body, timeout=HANGS_S)
            good = answer.status_code == 200
            texts.append((model, answer.status_code, answer.json()["choices"][0]["text"] if good else answer.text))

    clients = [threading.Thread(target=client, args=(NAMES[number % 2],)) for number in range(6)]
    for each in clients:
        each.start()
    answer = here.post("/admin/plan", carry_out=True)
    seen = len(texts)
    eventually(lambda: len(texts) > seen + 20)
    stop.set()
    for each in clients:
        each.join()
    return answer, texts
