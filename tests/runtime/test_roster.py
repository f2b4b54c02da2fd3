"""Models that are added to a running server and removed again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engines import BLOCK_BYTES, FakeHost
from filekit import write_file, write_model
from fineserve_runtime.cli import app
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import EngineConfig, EngineHost, EngineListener, HostConfig
from fineserve_runtime.launch import Running, StartHost, launch
from fineserve_runtime.logs import EventLog
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import _service, served_scenario
from runtimekit import HANGS_S, eventually
from serverkit import ByteTokenizer, listening
from typer.testing import CliRunner

PRISM = "[{base: fineserve, name: p, residency: {policy: prism, tick_s: 0.05}}]"
ROOT = {"authorization": "Bearer root"}
ASK = {"prompt": "hello", "max_tokens": 4}


class Stuck(FakeHost):
    """An engine that is added starts for ever, until the server ends; one that is removed does not go."""

    def __init__(self, config: HostConfig, listener: EngineListener) -> None:
        super().__init__(config, listener, weight_bytes=64 * BLOCK_BYTES, step_s=0.0005)
        self.begun, self.quits = threading.Event(), threading.Event()
        self.told_to_quit = False

    def add(self, engine: EngineConfig) -> int:
        self.begun.set()
        self.told_to_quit = self.quits.wait(20)
        raise RuntimeError("the server is shutting down")

    def remove(self, engine: int) -> None:
        raise RuntimeError("it did not end")

    def quit(self) -> None:
        self.quits.set()


def start(config: HostConfig, listener: EngineListener) -> EngineHost:
    return FakeHost(config, listener, weight_bytes=64 * BLOCK_BYTES, step_s=0.0005)


def start_slow(config: HostConfig, listener: EngineListener) -> EngineHost:
    """Two thousand tokens take 20 s."""
    return FakeHost(config, listener, weight_bytes=64 * BLOCK_BYTES, step_s=0.01)


@dataclass
class Here:
    url: str
    running: Running
    log: list[dict[str, Any]]

    def add(self, **model: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/admin/models", json=model, headers=ROOT, timeout=HANGS_S)

    def remove(self, name: str) -> httpx.Response:
        return httpx.delete(f"{self.url}/admin/models/{name}", headers=ROOT, timeout=HANGS_S)

    def ask(self, model: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": model, **ASK, **options}, timeout=HANGS_S)

    @property
    def models(self) -> set[str]:
        return {each["id"] for each in httpx.get(f"{self.url}/v1/models").json()["data"]}


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str], start: StartHost = start
) -> Iterator[Here]:
    """A server from a file, over fake engines, with a third model's folder beside those of the file."""
    monkeypatch.setenv("ROOT_KEY", "root")
    write_model(folder / "third")
    always = [("runtime.admin_key_env", "ROOT_KEY"), ("runtime.weights_in_region", "true"), ("runtime.drain_s", "5")]
    file = load_file(write_file(folder), [*always, *changes])
    scenario = served_scenario(file, None)
    metrics, log, decisions = Metrics(model.id for model in scenario.models), EventLog(), list[dict[str, Any]]()
    with launch(file, scenario, log=decisions.append, observers=(metrics,), start=start) as running:
        service = _service(file, scenario, running, metrics, log, lambda folder: ByteTokenizer(), {})
        with listening(service) as (url, _):
            yield Here(url, running, decisions)
    log.close()


@pytest.mark.parametrize("changes", [(), (("systems", PRISM),)], ids=["resident", "prism"])
def test_a_model_is_added_serves_and_is_removed(
    changes: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, *changes) as here:
        before, free_bytes = here.models, here.running.hosts[0].ledger().free_bytes
        assert here.ask("third").status_code == 404
        for _ in range(2):  # it may come back
            added = here.add(model="third", path="third", max_model_len=512)
            assert added.status_code == 201 and added.json()["model"] == "third", added.text
            assert here.models == before | {"third"}
            eventually(lambda: here.ask("third").status_code == 200)
            assert 'vllm:prompt_tokens_total{model_name="third"}' in httpx.get(f"{here.url}/metrics").text
            assert here.remove("third").json() == {"model": "third", "state": "removed"}
            assert here.models == before and here.ask("third").status_code == 404
            assert here.running.hosts[0].ledger().free_bytes == free_bytes
            assert 'fineserve:model_ready{model_name="third"}' not in httpx.get(f"{here.url}/metrics").text
        assert {here.ask(model).status_code for model in before} == {200}
        kinds = [entry["event"] for entry in here.log if entry.get("event", "").startswith("Model")]
        assert kinds == ["ModelAdded", "ModelRemoved"] * 2
        result = replay(json.loads(json.dumps(here.log)))
        assert result.difference is None and result.events["ModelAdded"] == 2, "and the log of it decides the same"


@pytest.mark.slow
def test_its_requests_end_before_a_model_goes_or_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, ("runtime.drain_s", "3"), start=start_slow) as here:
        assert here.add(model="third", path="third", max_model_len=2048).status_code == 201
        answers: dict[int, httpx.Response] = {}

        def ask(tokens: int) -> None:
            answers[tokens] = here.ask("third", max_tokens=tokens)

        handle = here.running.hosts[0].engines[2]
        clients = [threading.Thread(target=ask, args=(tokens,)) for tokens in (20, 2000)]
        for client in clients:
            client.start()
        eventually(lambda: handle.state().running == 2)
        assert here.remove("third").status_code == 200
        for client in clients:
            client.join(60)
        assert answers[20].status_code == 200 and answers[20].json()["usage"]["completion_tokens"] == 20
        told = answers[2000]
        assert told.status_code in (404, 503), told.text
        assert told.json()["error"]["code"] in ("model_removed", "model_not_found")


def test_what_cannot_be_added_or_removed_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch) as here:
        before = here.models
        refused = [
            (409, "served already", {"model": "tiny-bf16", "path": "third"}),
            (409, "nowhere/config.json cannot be read", {"model": "x", "path": "nowhere"}),
            (409, "is more than the 2048 tokens", {"model": "x", "path": "third", "max_model_len": 4096}),
            (409, "there is no 7; served are 0", {"model": "x", "path": "third", "device": 7}),
            (409, "quantization", {"model": "x", "path": "third", "quantization": "magic"}),
            (400, "model: ", {"model": "../x", "path": "third"}),
            (400, "kv_dtype: ", {"model": "x", "path": "third", "kv_dtype": "fp8"}),
            (400, "path: ", {"model": "x"}),
        ]
        for status, problem, body in refused:
            answer = here.add(**body)
            assert answer.status_code == status and problem in answer.json()["error"]["message"], answer.text
        host = here.running.hosts[0]
        assert isinstance(host, FakeHost)
        host.failing_restarts = 1
        failed = here.add(model="third", path="third")
        assert failed.status_code == 503 and failed.json()["error"]["message"] == "it does not start"
        assert httpx.post(f"{here.url}/admin/models", json={"model": "x", "path": "third"}).status_code == 401
        assert here.models == before and len(host.engines) == 2
        assert here.remove("nobody").status_code == 404
        assert here.remove("tiny-fp8").status_code == 200, "those of the start may go, too"
        assert "the only model" in here.remove("tiny-bf16").json()["error"]["message"]


def test_a_model_whose_engine_does_not_end_is_gone_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, start=Stuck) as here:
        told = here.remove("tiny-fp8")
        assert told.status_code == 503 and "did not end" in told.json()["error"]["message"]
        assert here.models == {"tiny-bf16"} and here.remove("tiny-fp8").status_code == 404
        with pytest.raises(ValueError, match="was removed"):
            here.running.driver.stop("tiny-fp8")
        assert here.ask("tiny-bf16").status_code == 200


def test_a_server_ends_though_a_model_is_being_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fineserve_runtime.server.serving._LAST_WORDS_S", 0.1)
    with serving(tmp_path, monkeypatch, start=Stuck) as here:

        def add() -> None:
            with suppress(httpx.TransportError):  # it is cut
                here.add(model="third", path="third")

        client = threading.Thread(target=add)
        client.start()
        host = here.running.hosts[0]
        assert isinstance(host, Stuck) and host.begun.wait(10)
    client.join(10)
    assert host.told_to_quit and not client.is_alive()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("runtime.weights_in_region", "false"), "only where runtime.weights_in_region is true"),
        (("systems", '["static*"]'), "system static* splits its memory between the models of the start"),
    ],
)
def test_where_memory_has_no_place_for_it_a_model_is_refused(
    change: tuple[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, change) as here:
        for answer in (here.add(model="third", path="third"), here.remove("tiny-fp8")):
            assert answer.status_code == 409 and problem in answer.json()["error"]["message"]


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch) as here:

        def run(*arguments: str) -> Any:
            return CliRunner().invoke(app, ["model", *arguments, "--url", here.url, "--key-env", "ROOT_KEY"])

        added = run("add", "third", "--set", "path=third", "--set", "kv_cache_dtype=fp8_e4m3", "--set", "ttft_slo_s=2")
        assert added.output == "third: ready\n", added
        assert here.running.hosts[0].engines[2].config.kv_cache_dtype == "fp8_e4m3"
        assert run("remove", "third").output == "third: removed\n"
        wrong = run("remove", "tiny-fp8", "--set", "path=x")
        assert isinstance(wrong.exception, ValueError) and "--set is for add" in str(wrong.exception)
