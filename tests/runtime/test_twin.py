"""What a server remembers for its twin, and what it answers; fake engines, whose steps are slow enough to be measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engines import BLOCK_BYTES, FakeHost, continuation
from filekit import write_file
from fineserve_runtime.bounds import Bounds, Deadlines
from fineserve_runtime.cli import app
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import EngineConfig, EngineHost, EngineListener, HostConfig, Sampling, StepReport
from fineserve_runtime.jobs import Job, Refused
from fineserve_runtime.launch import StartHost
from fineserve_runtime.metrics import TWIN_IS_OFF
from fineserve_runtime.server.whatif import Move, moves_to
from fineserve_runtime.twin import Memory, Ring, Twin, _Tap
from fineserve_runtime.whatif import Answer, kinds, past
from runtimekit import HANGS_S, Heard, eventually
from serverkit import ByteTokenizer
from twinkit import NAMES, ROOT, SWAPPED, TWO, Here, serving_twin, trade_places
from typer.testing import CliRunner

from fineserve_sim.cluster import simulate
from fineserve_sim.policy.interfaces import EngineState
from fineserve_sim.systems.spec import AdaptiveSpec


def start(config: HostConfig, listener: EngineListener) -> EngineHost:
    return FakeHost(config, listener, weight_bytes=64 * BLOCK_BYTES, step_s=0.001)


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str], start: StartHost = start
) -> Iterator[Here]:
    monkeypatch.setenv("ROOT_KEY", "root")
    monkeypatch.setenv("FINESERVE_ADMIN_KEY", "root")
    always = [("runtime.admin_key_env", "ROOT_KEY"), ("runtime.weights_in_region", "true")]
    file = load_file(write_file(folder), [*always, *changes])
    with serving_twin(file, lambda folder: ByteTokenizer(), start) as here:
        yield here


def test_a_ring_keeps_the_last_rows_in_order() -> None:
    ring = Ring(3, 1, np.float64)
    for number in range(5):
        assert ring.copy()[:, 0].tolist() == list(range(max(0, number - 3), number))
        ring.add((number,))
    assert ring.copy()[:, 0].tolist() == [2, 3, 4]


def test_an_output_that_is_not_known_is_the_mean_of_its_models() -> None:
    nan = np.nan
    rows = [
        (10.0, 0, 5, 4, 9, 0.0, 0.1, 11.0),
        (11.0, 0, 5, 8, 9, 0.0, 0.1, 12.0),
        (12.0, 0, 5, nan, 9, 0.0, nan, nan),
        (13.0, 0, 5, nan, 3, 0.0, nan, nan),
        (14.0, 1, 5, nan, 7, 0.0, nan, nan),
    ]
    found = past(np.array(rows), 20.0)
    assert (
        found.output.tolist() == [4, 8, 6, 3, 7]
        and found.window_s == 10
        and found.arrival_s.tolist() == [0, 1, 2, 3, 4]
    )
    assert found.end_s.tolist()[:2] == [1, 2]


def test_every_step_is_in_a_row_of_its_kind() -> None:
    """Prompt tokens, decodes, cached tokens, in turn, stages, seconds."""
    rng = np.random.default_rng(1)
    prompts, flags = rng.choice([0, 32, 64], 600), rng.integers(0, 2, (2, 600))
    steps = np.column_stack([prompts, rng.integers(1, 5, 600), np.zeros(600), flags[0], 1 + flags[1], rng.random(600)])
    found = list(kinds(steps))
    assert sum(count for _, _, _, count, *_ in found) == 600
    assert sum(seconds.sum() for *_, seconds in found) == pytest.approx(steps[:, 5].sum())
    assert {new for _, _, new, *_ in found} >= {0, 32, 64} and {decodes for decodes, *_ in found} == {1, 2, 3, 4}
    assert sum(count for *_, count, turned, _, _ in found if turned) == flags[0].sum()
    assert sum(count for *_, count, _, stages, _ in found if stages == 2) == flags[1].sum()


def test_a_pipelines_step_counts_all_its_stages() -> None:
    """A batch alone takes its time in both stages. Two that are under way at a time leave one after the other, a stage's time
    apart."""
    memory, heard = Memory({"m": 0}), list[StepReport]()
    listener: Any = SimpleNamespace(on_step=heard.append)
    engines = {0: SimpleNamespace(config=SimpleNamespace(stages=2, name="m"))}
    host: Any = SimpleNamespace(engines=engines, config=SimpleNamespace(mode="processes"))
    tap, state = _Tap(listener, host, memory), EngineState(4, 4, 0, 4, 1000, 1.0)
    for begun_s, ended_s in ((0.0, 1.0), (2.0, 3.0), (2.5, 3.4), (3.0, 3.8)):
        tap.on_step(StepReport(0, begun_s, ended_s, 0.0, 0, 4, 100, (), (), state))
    assert memory.steps.copy()[:, -2:].tolist() == [
        [2, 1.0],
        [2, 1.0],
        [2, pytest.approx(0.8)],
        [2, pytest.approx(0.8)],
    ]
    assert len(heard) == 4


def test_the_simulator_has_the_memory_that_engines_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slabs of the weights count, which are more than the weights, and the null block does not."""
    weights, kept, answered = 6 * 2**20, tmp_path / "kept", Twin._answered

    def keep(twin: Twin, folder: Path) -> dict[str, Any]:
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        return answered(twin, folder)

    def heavy(config: HostConfig, listener: EngineListener) -> EngineHost:
        return FakeHost(config, listener, weight_bytes=weights, step_s=0.001)

    monkeypatch.setattr(Twin, "_answered", keep)
    with serving(tmp_path, monkeypatch, ("runtime.region_bytes", str(16 * 2**20)), start=heavy) as here:

        def answers() -> bool:
            """On a busy machine the first steps may be all alike."""
            here.load()
            return here.post("/admin/whatif").status_code == 200

        eventually(answers)
        ledger = here.running.hosts[0].ledger()
    answer = Answer(kept)
    result = simulate(answer._scenario(answer._plain | {"systems": [answer._present()]}))
    assert result.kv_capacity_bytes == (ledger.total_bytes - ledger.lost_bytes - 2 * weights,)


def test_the_server_answers_what_if_and_says_how_far_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch) as here:
        assert "no request came" in here.post("/admin/whatif").json()["error"]["message"]
        here.load()
        assert httpx.get(f"{here.url}/admin/whatif").status_code == 401
        present = httpx.get(f"{here.url}/admin/whatif", headers=ROOT, timeout=HANGS_S).json()
        assert present["requests"] == 40 and present["whatif"] is None and present["measured"]["throughput_per_s"] > 0
        error = present["error"]["throughput"]
        assert error == pytest.approx(
            present["simulated"]["throughput_per_s"] / present["measured"]["throughput_per_s"] - 1
        )
        registry = here.service.metrics.registry
        assert registry.get_sample_value("fineserve:twin_error", {"of": "throughput"}) == pytest.approx(error)
        other = here.post("/admin/whatif", system="static*", ttft_slo_s=1e-6).json()
        assert other["whatif"]["in_time"] == 0 and other["measured"]["in_time"] == 1
        wrong = {
            "one_device_fewer": ({"one_device_fewer": True}, 409, "the file has one device only"),
            "system": ({"system": "fineserv"}, 409, "fineserve"),
            "plan": (
                {"plan": {"models": [{"id": "x"}]}},
                409,
                "the plan has the models x; served are tiny-bf16, tiny-fp8",
            ),
            "limit": ({"ttft_slo_s": 0}, 400, "ttft_slo_s"),
            "key": ({"gpus": 3}, 400, "gpus"),
        }
        for body, status, said in wrong.values():
            told = here.post("/admin/whatif", **body)
            message = told.json()["error"]["message"]
            assert told.status_code == status and said in message and "\n" not in message, message


def test_a_model_without_requests_has_the_steps_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch) as here:
        here.load(16, NAMES[:1])
        answer = here.post("/admin/whatif", system="static*")
        assert answer.status_code == 200 and answer.json()["whatif"]["in_time"] == 1, answer.text


def test_a_twin_that_is_off_raises_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, ("runtime.twin_error", "1e-9")) as here:
        here.load()
        answer = here.post("/admin/whatif")
        assert answer.status_code == 200, answer.text
        ((what, facts),) = [each for each in here.alarms if each[0] == TWIN_IS_OFF]
        assert facts["allowed"] == 1e-9 and set(facts) >= {"throughput", "ttft"}, what
        assert here.service.metrics.registry.get_sample_value("fineserve:twin_alarms_total") == 1


def test_a_simulator_that_fails_is_no_mistake_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch) as here:
        here.load(8)
        monkeypatch.setattr(Twin, "_facts", lambda twin, now_s: {})
        answer = here.post("/admin/whatif")
        assert answer.status_code == 503 and "the simulator failed: KeyError" in answer.text, answer.text


@pytest.mark.slow
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, *TWO) as here:
        here.load()
        told = CliRunner().invoke(app, ["whatif", "--one-device-fewer", "--url", here.url])
        assert told.exit_code == 0 and "the simulator is off by: throughput" in told.output, told.output + str(
            told.exception
        )
        found = CliRunner().invoke(app, ["plan", "--seconds", "1", "--json", "--url", here.url])
        assert found.exit_code == 0, found.exception
        answer = json.loads(found.output)
        assert (
            set(answer["groups"]) == set(NAMES) and answer["moves"] is None and answer["whatif"]["throughput_per_s"] > 0
        )
        (tmp_path / "plan.yaml").write_text(json.dumps(answer["plan"]))
        again = CliRunner().invoke(app, ["whatif", "--plan", str(tmp_path / "plan.yaml"), "--url", here.url])
        assert again.exit_code == 0 and "whatif" in again.output, again.exception
        absent = CliRunner().invoke(app, ["whatif", "--plan", str(tmp_path / "none.yaml"), "--url", here.url])
        assert "none.yaml" in str(absent.exception)


def test_moves_are_refused_by_name() -> None:
    present = {"A": [[0]], "B": [[1]]}
    assert moves_to({"A": [[1]], "B": [[1]]}, present, (0, 1)) == [Move("A", 0, 1)]
    for wanted, said in (
        ({"A": [[0]]}, "no device for model B"),
        ({"A": [[0], [1]], "B": [[1]]}, "model A several devices"),
        ({"A": [[0, 1]], "B": [[1]]}, "model A several devices"),
        ({"A": [[2]], "B": [[1]]}, "model A on device 2"),
    ):
        with pytest.raises(ValueError, match=said):
            moves_to(wanted, present, (0, 1))
    with pytest.raises(ValueError, match="model A has several devices"):
        moves_to(present, {"A": [[0, 1]]}, (0, 1))


def test_a_plan_is_carried_out_under_load_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models trade places while requests for both go on."""
    with serving(tmp_path, monkeypatch, *TWO) as here:
        answer, texts = trade_places(here)
        assert answer.status_code == 200 and len(answer.json()["moves"]) == 2, answer.text
        assert here.service.twin is not None and here.service.twin.groups() == SWAPPED
        right = ByteTokenizer().decode(continuation(tuple(ByteTokenizer().encode("hello")), 12))
        assert {(status, text) for _, status, text in texts} == {(200, right)}, texts


def test_a_request_knows_how_long_its_model_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, *TWO) as here:
        driver, jobs = here.running.driver, list[Job]()
        submit = driver.submit

        def arrived() -> None:
            driver.resume(NAMES[0])
            here.service.moving.discard(NAMES[0])

        def note(make: Callable[[int], Job]) -> Job:
            try:
                jobs.append(submit(make))
            except Refused:
                Timer(0.05, arrived).start()
                raise
            return jobs[-1]

        monkeypatch.setattr(driver, "submit", note)
        here.service.moving.add(NAMES[0])
        driver.stop(NAMES[0])
        here.load(1)
        (job,) = jobs
        assert 0 < job.held_s <= job.waited_s
        assert job.due_from_s == job.arrival_s + job.held_s


def test_a_request_that_waited_for_its_model_is_not_late_for_that() -> None:
    deadlines = Deadlines(AdaptiveSpec(), Bounds(queued_s=10.0), {"m": 2.0})
    held = Job(0, "m", (1,), Sampling(), Heard(), 2.0, waited_s=5.0, held_s=5.0, arrival_s=100.0)
    held.queued_s = held.due_from_s
    assert deadlines.core_arrival_s(held) == 105.0
    assert deadlines.overdue(held, 106.9, unled=True) is None
    late = deadlines.overdue(held, 107.1, unled=True)
    assert late is not None and late.reason == "deadline"


class Narrow(FakeHost):
    """Its slabs are too small for any other model."""

    def check(self, engine: EngineConfig) -> None:
        raise ValueError(f"{engine.name}: its KV blocks do not fit")


def test_a_plan_is_refused_before_it_starts_where_a_model_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_narrow(config: HostConfig, listener: EngineListener) -> EngineHost:
        return (Narrow if config.gpus == (0,) else FakeHost)(
            config, listener, weight_bytes=64 * BLOCK_BYTES, step_s=0.001
        )

    with serving(tmp_path, monkeypatch, *TWO, start=start_narrow) as here:
        told, texts = trade_places(here)
        assert told.status_code == 409 and "tiny-fp8: its KV blocks do not fit" in told.text
        assert here.service.twin is not None
        assert here.service.twin.groups() == {"tiny-bf16": [[0]], "tiny-fp8": [[1]]}
        assert {status for _, status, _ in texts} == {200}


def test_a_plan_is_refused_where_models_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, *TWO, ("runtime.weights_in_region", "false")) as here:
        told, _ = trade_places(here)
        assert here.service.twin is not None
        assert told.status_code == 409 and "weights_in_region" in told.json()["error"]["message"]
        assert here.service.twin.groups() == {"tiny-bf16": [[0]], "tiny-fp8": [[1]]}
