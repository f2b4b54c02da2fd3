"""Models that an operator puts to sleep and wakes while the server runs."""

from __future__ import annotations

import httpx
import pytest
from fake_engines import continuation
from fineserve_runtime.cli import app
from fineserve_runtime.core import CoreSpec
from fineserve_runtime.server.service import Key
from runtimekit import core_spec, eventually, runtime
from serverkit import served
from typer.testing import CliRunner

from fineserve_sim.systems.spec import FcfsSpec, PrismResidencySpec

ASK = {"model": "A", "prompt": "hello", "max_tokens": 4}
RESIDENT = core_spec(scheduler=FcfsSpec(), weight_bytes=4 * 1024)
PRISM = core_spec(scheduler=FcfsSpec(), weight_bytes=4 * 1024, residency=PrismResidencySpec(tick_s=0.05))


@pytest.mark.parametrize("spec", [RESIDENT, PRISM], ids=["resident", "prism"])
def test_a_model_sleeps_when_its_last_request_ends_and_wakes_again(spec: CoreSpec) -> None:
    with runtime(spec, step_s=0.001) as here:
        engine, free_bytes = here.host.engines[0], here.host.free_bytes()
        _, running = here.ask("A", tokens=50)
        here.driver.stop("A")
        assert here.driver.health("A").condition == "stopped" and not engine.asleep
        eventually(lambda: engine.asleep)
        assert running.tokens_ == continuation((5, 6, 7), 50), "those that are here go on"
        assert here.host.free_bytes() == free_bytes + 4 * 1024
        _, other = here.ask("B", tokens=5)
        eventually(lambda: other.end is not None)
        here.driver.resume("A")
        _, again = here.ask("A", tokens=5)
        eventually(lambda: again.end is not None)
        assert again.tokens_ == continuation((5, 6, 7), 5) and not engine.asleep
        assert here.driver.health("A").condition == "ready" and here.driver.health("A").down_s == 0


def test_the_admin_api_has_a_key_of_its_own() -> None:
    with served(RESIDENT, keys=(Key("team", "t"),), admin_secret="root") as here:
        path = "/admin/models/A/sleep"
        assert here.post(path, {}, authorization="Bearer t").status_code == 401
        assert here.post(path, {}).status_code == 401
        root = {"authorization": "Bearer root"}
        assert here.post("/v1/completions", ASK, **root).status_code == 401, "nor is it one for clients"
        assert here.post(path, {}, **root).json() == {"model": "A", "state": "stopped"}
        eventually(lambda: here.runtime.host.engines[0].asleep)
        refused = here.post("/v1/completions", ASK, authorization="Bearer t")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_stopped"
        assert httpx.get(here.url + "/ready").json()["models"] == {"A": "stopped", "B": "ready"}
        assert here.post("/admin/models/A/wake", {}, **root).status_code == 200
        eventually(lambda: here.post("/v1/completions", ASK, authorization="Bearer t").status_code == 200)
        assert here.post("/admin/models/A/dance", {}, **root).status_code == 404
        assert here.post("/admin/models/nobody/sleep", {}, **root).status_code == 404


def test_without_a_key_or_room_for_sleep_there_is_none() -> None:
    with served(RESIDENT) as here:
        assert here.post("/admin/models/A/sleep", {}).status_code == 404
    with served(core_spec(), admin_secret="root") as here:
        told = here.post("/admin/models/A/sleep", {}, authorization="Bearer root")
        assert told.status_code == 409 and "weights_in_region" in told.json()["error"]["message"]


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINESERVE_ADMIN_KEY", "root")
    with served(RESIDENT, admin_secret="root") as here:
        done = CliRunner().invoke(app, ["model", "sleep", "A", "--url", here.url])
        assert done.output == "A: stopped\n"
        eventually(lambda: here.runtime.host.engines[0].asleep)
        wrong = CliRunner().invoke(app, ["model", "sleep", "C", "--url", here.url])
        assert isinstance(wrong.exception, ValueError) and "does not exist" in str(wrong.exception)


@pytest.mark.parametrize("name", [".", "..", "a/b", ""])
def test_a_name_that_is_another_path_is_refused(name: str) -> None:
    """Clients and proxies make ``/admin/models/..`` another path, so that nobody could remove the model."""
    with served(RESIDENT, admin_secret="root") as here:
        added = here.post("/admin/models", {"model": name, "path": "x"}, authorization="Bearer root")
        assert added.status_code == 400 and added.json()["error"]["param"] == "model", added.text
