"""How sure an answer is: bands of the number of GPUs against brute force, classes of predictions, margins."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import gpu
from fineserve_sim.catalog.model_errors import ANY, Predictable, model_error, model_errors, wider
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.experiment import run_experiment
from fineserve_sim.experiment.results.step_times import measured_text, own_tables
from fineserve_sim.experiment.sizing import Attained, axis_of, goals, size
from fineserve_sim.experiment.sizing.probe import Prober
from fineserve_sim.experiment.sizing.sure import FACTOR, class_of, gpu_band, with_bands

ONE = """\
fineserve: 1
title: One model
cluster: {gpu: h100-sxm, count: 4}
models: [{id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 60}]
workload: {lengths: {prompt_tokens: 1024, output_tokens: 4}, requests: 60}
slo: {ttft_s: 0.3}
systems: [static*]
seeds: 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(ONE, encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Needing(Prober):
    """A cluster that needs so many GPUs for each unit of step time."""

    needed: float = 1.0

    def ask(self, system: str, key: str, value: float, *, fully: bool = False) -> Attained:
        factor = float(dict(self.overrides).get(FACTOR, 1.0))
        return Attained(value, value >= self.needed * factor, {}, None, 1, False)


@given(needed=st.floats(0.2, 12.0), shared=st.booleans())
def test_the_band_is_brute_forces(tmp_path_factory: pytest.TempPathFactory, needed: float, shared: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "needing.yaml"
    path.write_text(ONE, encoding="utf-8")
    prober = Needing(path, path.parent / "out", goals(["ttft:0.9"]), needed=needed)
    count = max(1, math.ceil(needed))
    best = Attained(count, True, {"ttft_attainment": 1.0}, None, 1, False, shared=shared)
    band = gpu_band(prober, "static*", best)
    low, high = (max(1, math.ceil(needed * end)) for end in (band.error.low, band.error.high))
    assert band.fewest == min(low, count)
    assert band.most == (max(high, count) if high <= band.tried else None)
    assert band.error.of.sharing == ("shared" if shared else "alone")


@dataclass(frozen=True, slots=True)
class Full(Prober):
    """A cluster that holds only with steps as predicted, on any number of GPUs: a placement that uses no more of them."""

    asked: list[tuple[bool, float]] = field(default_factory=list)

    def ask(self, system: str, key: str, value: float, *, fully: bool = False) -> Attained:
        slow = float(dict(self.overrides).get(FACTOR, 1.0)) > 1
        self.asked.append((slow, value))
        return Attained(value, not slow, {"ttft_attainment": 0.5 if slow else 1.0}, None, 1, False)


def test_more_gpus_that_change_nothing_are_not_all_asked(file: Path, tmp_path: Path) -> None:
    """A run asked for 10, 11, 12, 13, 14 and 15 GPUs, 98.5 % each."""
    prober = Full(file, tmp_path / "out", goals(["ttft:0.9"]))
    band = gpu_band(prober, "static*", Attained(9, True, {"ttft_attainment": 1.0}, None, 1, False))
    assert band.most is None and [value for slow, value in prober.asked if slow] == [9, 15, 14]


def test_nothing_is_asked_where_slower_steps_put_the_target_out_of_reach(file: Path, tmp_path: Path) -> None:
    """A prompt alone takes 25 ms: 1.19 times as long is over the limit on any number of GPUs."""
    file.write_text(ONE.replace("ttft_s: 0.3", "ttft_s: 0.027"), encoding="utf-8")
    prober = Full(file, tmp_path / "out", goals(["ttft:0.9"]))
    assert prober.bound("static*", "cluster.count", 4).bounds == {"ttft_attainment": 1.0}
    band = gpu_band(prober, "static*", Attained(4, True, {"ttft_attainment": 1.0}, None, 1, False))
    assert band.most is None and [value for slow, value in prober.asked if slow] == [4]


def test_slower_steps_take_no_fewer_gpus(file: Path, tmp_path: Path) -> None:
    """With the simulator: the answer lies inside its band, and only answers in GPUs have one."""
    prober = Prober(file, tmp_path / "out", goals(["ttft:0.9"]))
    (answer,) = size(prober, axis_of("gpus"), most_gpus=8)
    ((sure, _),) = with_bands([(answer, prober)], axis_of("gpus"), 8)
    assert sure.band is not None and sure.best is not None
    assert sure.band.fewest <= sure.best.value <= (sure.band.most or math.inf)
    assert sure.band.told()["text"] == str(sure.band)
    ((other, _),) = with_bands([(answer, prober)], axis_of("rate"), 8)
    assert other.band is None


def test_classes_of_predictions(file: Path, tmp_path: Path) -> None:
    def of(**changed: Any) -> Predictable:
        overrides = [(key.replace("__", "."), value) for key, value in changed.items()]
        return class_of(Prober(file, tmp_path, goals(["ttft:0.9"]), overrides).file().setup, shared=False)

    assert of() == Predictable("tpot", "measured", "vllm", "alone", "below", "dense")
    assert of(cluster__gpu="a100-40gb").tables == "scaled"
    assert of(cluster__gpu="h100-pcie").tables == "scaled"
    assert of(engine__latency="roofline").tables == "scaled"
    assert of(engine__deployment="sglang-0.5").engine == "other"


def test_every_class_has_a_band_that_holds_the_ratio_of_its_middle() -> None:
    """The widest class speaks where nothing nearer does; no band is empty, and each names what it was learnt from."""
    assert model_errors().level == 0.9
    for each in model_errors().classes:
        assert 0 < each.low < each.high and each.sets >= 3 and each.rows >= each.sets
    for moment in ("ttft", "tpot"):
        unknown = Predictable(moment, "measured", "other", "shared", "above", "dense")
        assert model_error(unknown).of == Predictable(moment, *[ANY] * 5)
        assert wider(unknown)[0] == unknown


def test_a_margin_slows_requests_and_moves_no_limit(file: Path, tmp_path: Path) -> None:
    reference = "ttft: {reference: {system: static*, load: isolated, quantile: 0.9}, scale: 2}"
    file.write_text(ONE.replace("ttft_s: 0.3", reference), encoding="utf-8")
    found = {}
    for margin in ("1.0", "1.5"):
        out = run_experiment(file, tmp_path / margin, overrides=[(FACTOR, margin), ("cluster.count", "1")], jobs=1)
        found[margin] = json.loads(out.read_text(encoding="utf-8"))
    assert found["1.0"]["slo"] == found["1.5"]["slo"]
    before, after = (found[margin]["cells"][0]["metrics"]["ttft_p50_s"]["mean"] for margin in ("1.0", "1.5"))
    assert after > 1.5 * before  # a queue grows faster than its steps


def test_how_much_is_measured_is_told_with_whose_tables() -> None:
    engine = EngineSettings()
    assert own_tables([gpu("h100-sxm"), gpu("h200-sxm")], engine)
    assert not own_tables([gpu("gh200"), gpu("h100-sxm")], engine) and not own_tables([gpu("h800")], engine)
    shares = {"shares": {"measured": 0.58}}
    assert measured_text(shares | {"tables_of": "h100-sxm", "own": True}) == "58 %"
    assert measured_text(shares | {"tables_of": "h100-sxm", "own": False}) == "0 % (58 % on h100-sxm, scaled)"
    assert measured_text(shares | {"tables_of": None, "own": False}) == "58 %"
    assert measured_text({"tables_of": None, "own": False}) == "–"
