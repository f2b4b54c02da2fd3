"""What binds, which cell is chosen, what it costs, and the searches around it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fineserve_sim as fs
from fineserve_sim import catalog
from fineserve_sim.catalog.model_errors import model_errors
from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment
from fineserve_sim.experiment.results.answer import answer_of
from fineserve_sim.experiment.results.binding import binds
from fineserve_sim.experiment.results.cost import costs, price_of
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.sizing import around
from fineserve_sim.experiment.sizing.around import search_around
from fineserve_sim.experiment.sizing.gpu_band import GpuBand
from fineserve_sim.experiment.sizing.probe import Attained

NONE = dict.fromkeys(CAUSES, 0)
IDLE = {"waiting": 0.0, "kv_short": 0.0, "slots_short": 0.0, "compute": 0.1, "bandwidth": 0.4}


def model(gpus: list[int], **misses: int) -> dict[str, Any]:
    return {"instances": [gpus] if gpus else [], "misses": NONE | misses}


@pytest.mark.parametrize(
    ("use", "misses", "what"),
    [
        ({"waiting": 0.9, "compute": 0.8}, {"late": 5}, "compute"),
        ({"waiting": 0.9, "compute": 0.2, "bandwidth": 0.9}, {"dropped": 5}, "bandwidth"),
        ({"waiting": 0.9, "kv_short": 0.6}, {"late": 5}, "KV memory"),
        ({"waiting": 0.9, "slots_short": 0.9}, {"unfinished": 5}, "slots"),
        ({"waiting": 0.05}, {"dropped": 5, "late": 1}, "policy"),
        ({"waiting": 0.05}, {"late": 5}, "bursts"),
        ({"waiting": 0.05}, {"slow": 5}, "bandwidth"),
        ({}, {"rejected": 5}, "KV memory"),
    ],
)
def test_what_binds_a_model_on_its_gpu(use: dict[str, float], misses: dict[str, int], what: str) -> None:
    (found,) = binds({"A": model([0], **misses)}, [IDLE | use])
    assert found["what"] == what and found["gpus"] == [0] and found["misses"] == sum(misses.values())


def test_what_binds_most_comes_first_and_a_model_without_a_gpu_binds_by_placement() -> None:
    models = {"A": model([0, 1], late=3), "B": model([], unplaced=9), "C": model([], late=2), "D": model([1], late=4)}
    found = binds(models, [IDLE | {"waiting": 0.9, "compute": 0.7}] * 2)
    assert [(entry["what"], entry["misses"]) for entry in found] == [("placement", 9), ("compute", 7), ("weights", 2)]
    assert found[1]["gpus"] == [0, 1] and found[1]["models"] == {"A": 3, "D": 4} and found[0]["gpus"] == []


def cell(
    system: str, gpus: int, rate: float, attainment: float, usd: float | None = None, half_width: float = 0.01
) -> Any:
    return {
        "sweep": "run",
        "system": system,
        "title": system,
        "axes": {"rate_scale": rate} | ({"cluster.count": gpus} if gpus != 2 else {}),
        "cluster": {"gpu": "h100-sxm", "count": gpus},
        "cost": {"usd_per_hour": usd},
        "metrics": {
            "slo_attainment": {"mean": attainment, "half_width": half_width, "observations": [attainment] * 3},
            "arrival_rate_per_s": {"mean": 10 * rate},
        },
    }


def test_the_answer_is_where_systems_part_and_the_cheapest_that_holds() -> None:
    cells = [cell("a", 2, 1, 0.99), cell("b", 2, 1, 0.98), cell("a", 2, 2, 0.97, 8.0), cell("b", 2, 2, 0.60)]
    cells += [cell("b", 4, 2, 0.999, 16.0), cell("bound", 2, 2, 1.0)]
    answer = answer_of(cells, 2, ["bound"])
    assert answer is not None
    assert (answer["axes"], answer["systems"], answer["most_gpus"]) == ({"rate_scale": 2}, 2, 4)
    assert (answer["choice"]["system"], answer["choice"]["gpus"], answer["choice"]["holds"]) == ("a", 2, True)
    assert answer["choice"]["margins"]["slo_attainment"]["margin"] == pytest.approx(0.02)
    assert answer["breaks"] == {"a": {"holds_to": 2, "fails_at": None}, "b": {"holds_to": 1, "fails_at": 2}}


def test_the_answer_is_where_the_file_asks_for_it() -> None:
    cells = [cell("a", 2, 1, 0.99), cell("b", 2, 1, 0.98), cell("a", 2, 2, 0.97), cell("b", 2, 2, 0.60)]
    answer = answer_of(cells, 2, at={"rate_scale": 1})
    assert answer is not None
    assert (answer["axes"], answer["at"], answer["choice"]["system"]) == ({"rate_scale": 1}, {"rate_scale": 1}, "a")
    assert "at" not in (answer_of(cells, 2) or {})


def test_the_screen_names_the_place_of_the_answer_and_size_asks_there(folder: Path, tmp_path: Path) -> None:
    text = (folder / "two.yaml").read_text(encoding="utf-8")
    sweep = "sweeps: [{name: rate, axes: {rate_scale: [0.5, 1]}}]\n"
    (tmp_path / "two.yaml").write_text(f"{text}{sweep}answer: {{at: {{rate_scale: 0.5}}}}\n", encoding="utf-8")
    found = fs.run(tmp_path / "two.yaml", tmp_path / "out", jobs=1, overrides={"workload.requests": 20}, seeds=1)
    assert found.answer.startswith("At rate scale 0.5, as the file asks: ")
    sized = fs.size(tmp_path / "out", {"ttft": 0.5}, jobs=1, most_gpus=1)
    assert sized.answer.startswith(
        f"At rate scale 0.5, where the run in {tmp_path / 'out'} answered; --at names another"
    )
    assert sized.result is not None and sized.result.summary["cells"][0]["axes"]["rate_scale"] == 0.5
    with pytest.raises(ConfigError, match=r"answer\.at: no cell is there; give values of axes that a sweep has"):
        fs.run(tmp_path / "two.yaml", overrides={"answer.at": {"rate_scale": 3}})


def test_dollars_are_never_compared_with_gpus() -> None:
    """Three GPUs without a price are no cheaper than two at $6.98 an hour: the numbers of GPUs decide."""
    cells = [cell("unpriced", 3, 1, 0.99), cell("priced", 2, 1, 0.99, 6.98), cell("bad", 2, 1, 0.1)]
    answer = answer_of(cells, 2)
    assert answer is not None and answer["choice"]["system"] == "priced"


def test_where_nothing_holds_the_closest_on_the_gpus_of_the_file_is_told() -> None:
    cells = [cell("a", 2, 1, 0.5), cell("b", 2, 1, 0.5), cell("c", 2, 1, 0.1), cell("own", 4, 1, 0.9)]
    answer = answer_of(cells, 2)
    assert answer is not None and not answer["choice"]["holds"]
    assert answer["choice"]["system"] == "a" and answer["as_good"] == ["b"]
    assert answer_of(cells[:1], 2, ["a"]) is None


def test_one_system_under_several_settings_of_the_cluster_is_named_by_them() -> None:
    cells = [cell("a", 2, 1, 0.99, 8.0), cell("a", 2, 1, 0.99, 8.0), cell("a", 1, 1, 0.99, 9.0), cell("b", 2, 1, 0.5)]
    for entry, word in zip(cells, ("mps", "fluid", "mps", "mps"), strict=True):
        entry["axes"]["cluster.sharing"] = word
    answer = answer_of(cells, 2)
    assert answer is not None and answer["choice"]["title"] == "a (sharing mps)"
    assert answer["as_good"] == ["a (sharing fluid)", "a (sharing mps) on 1 h100-sxm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answer") / "two.yaml"
    path.write_text(
        """\
fineserve: 1
title: Two models
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 40}
  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 40}
workload: {lengths: {prompt_tokens: 1024, output_tokens: 4}, requests: 200}
slo: {ttft_s: 0.2, e2e_s: 2.0}
systems: ["static*"]
seeds: 1
""",
        encoding="utf-8",
    )
    run_experiment(path, path.parent / "out", jobs=1)
    return path.parent


def test_prices_are_the_files_or_dated_defaults(folder: Path) -> None:
    listed = catalog.list_prices()
    assert (
        set(listed.usd_per_gpu_hour) <= set(catalog.gpus()) and listed.read_on and listed.source.startswith("https://")
    )
    setup = load_experiment(folder / "two.yaml").setup
    assert price_of(setup)[:2] == (listed.usd_per_gpu_hour["h100-sxm"], True)
    given = load_experiment(folder / "two.yaml", [("cluster.usd_per_gpu_hour", "2.5")]).setup
    assert price_of(given)[:2] == (2.5, False)
    unknown = load_experiment(folder / "two.yaml", [("cluster.gpu", "h800")]).setup
    assert price_of(unknown).usd_per_gpu_hour is None
    metrics = {"gpu_hours_per_mtoken": {"mean": 2.0}, "gpu_hours_per_1000_within": {"mean": None}}
    eight = load_experiment(folder / "two.yaml", [("cluster.usd_per_gpu_hour", "2.5"), ("cluster.count", "8")]).setup
    found = costs(eight, metrics)
    assert found == {"usd_per_hour": 20.0, "usd_per_mtoken": 5.0, "usd_per_1000_within": None}
    assert set(costs(unknown, metrics).values()) == {None}


def test_the_search_around_an_answer_finds_where_it_breaks(folder: Path) -> None:
    told: list[str] = []
    summary = search_around(folder / "out", jobs=1, told=lambda asked, found: told.append(asked))
    assert summary == json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    answer = summary["answer"]
    rate, gpus = answer["search"]["rate"], answer["search"]["gpus"]
    assert rate["value"] < rate["fails_at"] <= rate["value"] * 1.1 + 1e-9
    assert answer["choice"]["holds"] == (rate["value"] >= 1.0)
    assert gpus["value"] is None or gpus["value"] <= gpus["most"]
    assert len(told) == len(set(told)) and told[0] == "static*, rate_scale 1"


@dataclass(frozen=True)
class FakeProber:
    """Keeps its target on these numbers of GPUs alone."""

    holds_on: tuple[int, ...]
    at: Any = None

    def ask(self, system: str, key: str, value: float, *, fully: bool = False) -> Attained:
        share = 0.96 if value in self.holds_on else 0.9
        missed_by = {"m": int(value)}  # no two numbers come to the very same
        shares = {"slo_attainment": share}
        return Attained(value, share > 0.95, shares, None, 1, False, usd_per_hour=value, missed_by=missed_by)


@pytest.mark.parametrize(
    ("holds_on", "value", "not_on"), [((11, 12), 11, 16), ((13, 14, 15, 16), 13, None), ((), None, None)]
)
def test_more_gpus_that_do_not_help_hide_no_fewer_that_do(
    holds_on: tuple[int, ...], value: int | None, not_on: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around, "gpu_band", lambda *_: GpuBand(model_errors().classes[0], 1, 1, 1))
    choice = {"system": "mine", "title": "Mine", "gpus": 8, "holds": False}
    answer = {"choice": choice, "axes": {"rate_scale": 1.0}, "targets": {"slo_attainment": 0.95}}
    found = around._gpus(FakeProber(holds_on), answer, [("mine", "Mine"), ("other", "Other")], {})  # type: ignore[arg-type]
    assert (found["value"], found.get("not_on"), found["most"]) == (value, not_on, 16)
