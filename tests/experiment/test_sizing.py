"""Bisection against brute force, exact early stopping, and a search over a small experiment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.experiment import ConfigError
from fineserve_sim.experiment.results.hits import Hits
from fineserve_sim.experiment.results.metrics import Measures, measure
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.experiment.show.sizes import headline, reasons
from fineserve_sim.experiment.sizing import (
    Answer,
    Attained,
    Goal,
    SizingError,
    axis_of,
    cheapest,
    goal,
    probe,
    size,
    to_take,
)
from fineserve_sim.experiment.sizing.bisection import OTHERS, easiest_turn, first_integer
from fineserve_sim.experiment.sizing.probe import Prober, _sure, _sure_of
from fineserve_sim.experiment.sizing.report import answer_json, as_json
from fineserve_sim.experiment.sizing.search import fewest_gpus, least_gpus
from fineserve_sim.experiment.sizing.variants import size_all, variants

ONE = """\
fineserve: 1
title: One model
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 30}
  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 30}
workload: {lengths: {prompt_tokens: 1024, output_tokens: 4}, requests: 120}
slo: {ttft_s: 0.3}
systems: ["static*"]
seeds: 3
"""


@given(st.integers(1, 40), st.integers(1, 60))
def test_first_integer_is_brute_forces_and_asks_few(high: int, turn: int) -> None:
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return value >= turn

    expected = next((value for value in range(1, high + 1) if value >= turn), None)
    assert first_integer(1, high, holds) == expected
    assert len(asked) <= 1 + high.bit_length() + (expected is None) * 2 * OTHERS


def test_more_may_be_worse() -> None:
    """On 12 GPUs a policy may place more replicas than on 10, and hold less: what holds in between is found."""
    assert first_integer(1, 16, lambda count: count in (10, 11)) == 10
    assert first_integer(3, 8, lambda count: count == 5) == 5
    assert first_integer(2, 16, lambda count: False) is None


@given(st.floats(0.02, 50.0), st.sampled_from([0.5, 2.0]), st.sampled_from([0.01, 0.2]))
def test_the_turn_is_found_within_the_precision(turn: float, easier: float, precision: float) -> None:
    """Easier values are those beyond the turn, in the direction of ``easier``."""

    def holds(value: float) -> bool:
        return value >= turn if easier > 1 else value <= turn

    found = easiest_turn(1.0, easier, 64.0, precision, holds)
    assert found is not None and holds(found)
    assert max(found / turn, turn / found) <= 1 + precision + 1e-9


def test_what_never_turns() -> None:
    assert easiest_turn(1.0, 2.0, 8.0, 0.1, lambda value: False) is None
    assert easiest_turn(1.0, 2.0, 8.0, 0.1, lambda value: True) == 1 / 8


@given(st.lists(st.booleans(), min_size=12, max_size=12), st.sampled_from([0.5, 0.75, 0.9, 1.0]))
def test_an_early_answer_is_the_late_one(hits: list[bool], share: float) -> None:
    truth = sum(hits) / len(hits) >= share
    answers = [_sure(sum(hits[:count]), count, len(hits), share) for count in range(len(hits) + 1)]
    assert answers[-1] is truth
    assert all(answer in (None, truth) for answer in answers)


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_share_that_is_met_exactly_holds(percent: int) -> None:
    assert _sure(percent, 100, 100, float(f"0.{percent:02}") if percent < 100 else 1.0) is True


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=4), st.sampled_from([0.5, 0.9]))
def test_seeds_of_unlike_length_count_by_their_requests(runs: list[list[bool]], share: float) -> None:
    """Phases and arrivals of many models have as many requests as the seed has it."""
    measured = [run_of(hits) for hits in runs]
    every = [hit for hits in runs for hit in hits]
    truth = sum(every) / len(every) >= share
    for count in range(1, len(runs) + 1):
        sure = _sure_of(measured[:count], len(runs), Goal("slo_attainment", share), alike=False)
        assert sure is (truth if count == len(runs) else None)


def run_of(hits: list[bool]) -> Measures:
    return Measures({"arrived": len(hits)}, {"slo_attainment": {"": Hits.among(np.array(hits))}}, {})


@pytest.mark.parametrize("text", ["ttft", "ttft:2", "ttft:0", "itl:0.9", "ttft:x", "ttft:nan"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(SizingError, match="expected ttft:SHARE"):
        goal(text)


@given(
    st.lists(st.lists(st.lists(st.booleans(), max_size=6), min_size=2, max_size=2), min_size=1, max_size=4),
    st.sampled_from([0.5, 0.9, 1.0]),
)
def test_a_target_of_each_model_holds_where_each_of_them_keeps_it(runs: list[list[list[bool]]], share: float) -> None:
    """Against counting; a model without a request misses nothing."""
    measured = [measures(models) for models in runs]
    pooled = [[hit for models in runs for hit in models[model]] for model in (0, 1)]
    expected = all(sum(hits) >= share * len(hits) for hits in pooled)
    sure = _sure_of(measured, len(runs), Goal("each_slo_attainment", share), alike=True)
    assert sure is expected
    assert _sure_of(measured, len(runs) + 1, Goal("each_slo_attainment", share), alike=True) is None


def measures(models: list[list[bool]]) -> Measures:
    hits = {str(at): Hits.among(np.array(own, dtype=np.bool_)) for at, own in enumerate(models)}
    hits[""] = Hits.among(np.array([hit for own in models for hit in own], dtype=np.bool_))
    return Measures({"arrived": sum(map(len, models))}, {"slo_attainment": hits}, {}, ("0", "1"))


@pytest.mark.slow
def test_a_target_of_each_model_is_that_of_the_worst(file: Path, tmp_path: Path) -> None:
    """One model of two has few requests and a limit that it misses: 90 % of all are kept where 90 % of each are not."""
    text = ONE.replace("rate_per_s: 30}", "rate_per_s: 4}", 1).replace("{id: A,", "{id: A, ttft_slo_s: 0.032,")
    file.write_text(text, encoding="utf-8")
    of_all, of_each = (
        next(iter(size(Prober(file, tmp_path / name, [goal(text)]), axis_of("gpus"), most_gpus=2)))
        for name, text in (("all", "all:0.9"), ("each", "each:all:0.9"))
    )
    assert of_all.best is not None and of_all.best.worst is not None
    name, share = of_all.best.worst
    assert (name, share < 0.9) == ("A", True)
    assert of_each.best is None or of_each.best.shares["each_slo_attainment"] >= 0.9
    assert of_each.best is None or of_each.best.value > of_all.best.value


def test_axes_and_targets() -> None:
    assert goal("tpot:0.95") == Goal("tpot_attainment", 0.95)
    with pytest.raises(SizingError, match="expected one of gpus, rate, slo_scale"):
        axis_of("cards")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(ONE, encoding="utf-8")
    return path


def test_the_answer_holds_and_its_neighbours_tell_why(file: Path, tmp_path: Path) -> None:
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.99")], jobs=1)
    (answer,) = size(prober, axis_of("slo_scale"), precision=0.2)
    assert answer.best is not None and answer.best.holds and answer.best.shares["ttft_attainment"] >= 0.98
    tighter = [probe for probe in answer.probes if probe.value < answer.best.value]
    assert tighter and not any(probe.holds for probe in tighter)
    assert max(probe.value for probe in tighter) >= answer.best.value / 1.2 - 1e-9
    assert any(probe.early and probe.seeds == 1 for probe in tighter)
    assert answer.best.gpu_hours_per_mtoken


def test_one_seed_is_judged_by_the_limits_of_all(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that come from reference runs come from every seed of the file, though the first answers alone."""
    derived = "ttft: {reference: {system: static*, load: alone, quantile: 0.9}, scale: 2}"
    file.write_text(ONE.replace("ttft_s: 0.3", derived), encoding="utf-8")
    judged: list[tuple[int, dict[str, float]]] = []

    def spied(run: RunData, limits_s: dict[str, float], *given: Any) -> Measures:
        judged.append((len(run.arrival_s), limits_s))
        return measure(run, limits_s, *given)

    monkeypatch.setattr(probe, "measure", spied)
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.2")], jobs=1)
    early, full = (prober.ask("static*", "rate_scale", 1.0, fully=fully) for fully in (False, True))
    assert (early.seeds, full.seeds) == (1, 3) and early.holds and full.holds
    assert len(judged) == 1 + 1 + 3 and all(each == judged[0] for each in judged)


def test_an_answer_that_does_not_hold_over_all_seeds_is_searched_on(file: Path, tmp_path: Path) -> None:
    """At 3 the first seed holds, and another one cannot run."""

    @dataclass(frozen=True, slots=True)
    class Doubts(Prober):
        def ask(self, system: str, key: str, value: float, *, fully: bool = False) -> Attained:
            return Attained(value, value > 3 or (value == 3 and not fully), {}, None, 3 if fully else 1, not fully)

    found = fewest_gpus(Doubts(file, tmp_path, []), "static*", "Static*", 1, 8)
    assert found.best is not None and found.best.holds and found.best.value == 4
    assert [each.holds for each in found.probes if each.value == 3] == [False]


def test_gpus_that_do_not_hold_the_models_do_not_hold(file: Path, tmp_path: Path) -> None:
    large = ONE.replace("llama-3.1-8b", "qwen3-32b").replace("rate_per_s: 30", "rate_per_s: 1").replace("0.3}", "5.0}")
    file.write_text(large, encoding="utf-8")
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.9")], jobs=1)
    (answer,) = size(prober, axis_of("gpus"), most_gpus=2)
    assert answer.best is not None and answer.best.value == 2


def test_what_the_machine_cannot_do_is_no_answer(file: Path, tmp_path: Path) -> None:
    """Workers that die for want of memory, or a disk that refuses, say nothing of how many GPUs it takes."""
    (tmp_path / "out").write_text("a file in the way", encoding="utf-8")
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.9")], jobs=1)
    with pytest.raises(ConfigError, match="results cannot be written"):
        next(size(prober, axis_of("gpus"), most_gpus=2))


def test_a_tpot_target_needs_a_limit(file: Path, tmp_path: Path) -> None:
    prober = Prober(file, tmp_path / "out", [goal("tpot:0.9")], jobs=1)
    with pytest.raises(SizingError, match=r"TPOT needs slo\.tpot_s or slo\.tpot$"):
        next(size(prober, axis_of("rate")))


def test_as_a_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fineserve_sim.cli.app import app

    arguments = ["size", str(file), "--target", "ttft:0.5", "--over", "gpus", "--most-gpus", "2", "--jobs", "1"]
    arguments += ["--at", "engine.token_budget=2048"]  # a whole number of a place stays one
    app([*arguments, "--out", str(tmp_path / "out"), "--json"], standalone_mode=False)
    data = json.loads(capsys.readouterr().out)
    assert data["systems"][0]["answer"]["value"] in (1, 2)
    assert (tmp_path / "out" / "figures" / "size.svg").exists() and (tmp_path / "out" / "size.json").exists()


@pytest.mark.slow
def test_a_folder_tells_of_what_ran_last(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fineserve_sim.cli.app import app

    def page_of(*arguments: str) -> str:
        app([*arguments, "--jobs", "1", "--out", str(tmp_path / "out")], standalone_mode=False)
        return (tmp_path / "out" / "report.html").read_text(encoding="utf-8")

    search = ["size", str(file), "--most-gpus", "2", "--target"]
    held = page_of(*search, "ttft:0.5")
    assert "<h2>Search" in held and 'class="first is-bad"' not in held and 'class="map"' in held
    none = page_of(*search, "ttft:0.99", "--ttft-slo", "0.0001")
    assert "<h2>Search" in none and 'class="first is-bad"' in none and 'class="map"' in none  # with the closest cluster
    ran = page_of("run", str(file))
    assert "<h2>Search" not in ran and 'class="first is-' in ran


def test_none_has_its_reason_and_a_bound_is_no_answer(file: Path, tmp_path: Path) -> None:
    text = ONE.replace('["static*"]', '["static*", clairvoyant]').replace("ttft_s: 0.3", "ttft_s: 0.001")
    file.write_text(text, encoding="utf-8")
    (answer,) = size(Prober(file, tmp_path / "out", [goal("ttft:0.9")], jobs=1), axis_of("gpus"), most_gpus=2)
    assert answer.best is None and answer.why == "0.0 % at most are within reach, each model alone on idle GPUs"
    assert reasons([answer_json(answer)])[0] == f"None for Static*: {answer.why}."


def test_fewer_gpus_than_the_weights_need_are_not_asked(file: Path, tmp_path: Path) -> None:
    large = ONE.replace("llama-3.1-8b", "qwen3-32b").replace("rate_per_s: 30", "rate_per_s: 1").replace("0.3}", "5.0}")
    file.write_text(large, encoding="utf-8")
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.9")], jobs=1)
    assert least_gpus(prober.file().setup, "static*", 0.1) == 2
    assert least_gpus(prober.file().setup, "static*", 0.5) == 1  # each model's requests may be missed
    assert least_gpus(prober.file().setup, "prism", 0.1) == 1  # models come and go
    (answer,) = size(prober, axis_of("gpus"), most_gpus=4)
    assert all(probe.value >= 2 for probe in answer.probes)


def test_every_gpu_type_and_degree_is_tried_and_the_cheapest_is_told(file: Path, tmp_path: Path) -> None:
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.5")], jobs=1)
    tried = variants(["h100-sxm", "h200-sxm"], [1, 2], {"h100-sxm": 100.0, "": 2.0})
    found = [answer for answer, _ in size_all(prober, tried, axis_of("gpus"), most_gpus=4, precision=0.1)]
    assert [(answer.gpu, answer.tp) for answer in found] == [
        ("h100-sxm", 1),
        ("h100-sxm", 2),
        ("h200-sxm", 1),
        ("h200-sxm", 2),
    ]
    best = cheapest(found)
    assert best is not None and best.best is not None and best.gpu == "h200-sxm"
    assert best.best.usd_per_hour == 2.0 * best.best.value
    assert found[0].best is not None and found[0].best.usd_per_hour == 100.0 * found[0].best.value
    with pytest.raises(SizingError, match="no --gpu l40s is searched"):
        variants(["h100-sxm"], [], {"l40s": 1.0})


def answered(system: str, value: float, usd: float | None, gpu: str = "h100-sxm") -> Answer:
    return Answer(system, system, Attained(value, True, {}, None, 1, False, usd_per_hour=usd), (), gpu)


def test_the_one_to_take_is_the_best_along_the_axis() -> None:
    """Of rates the highest, not the first of equally dear clusters."""
    found = [answered("a", 1.0, 7.0), answered("b", 4.0, 7.0), answered("c", 4.0, 3.5), answered("d", 0.5, None)]
    taken = {name: to_take(found, axis_of(name)) for name in ("rate", "slo_scale")}
    assert [answer and answer.system for answer in taken.values()] == ["c", "d"]
    assert to_take([], axis_of("rate")) is None


def test_the_first_line_names_the_one_to_take() -> None:
    """Of equal rates the cheapest, which is the one that is shown."""
    found = [answered("a", 1.0, 3.5), answered("b", 4.0, 7.0), answered("c", 4.0, 3.5)]
    said = headline(as_json(found, axis_of("rate"), [goal("ttft:0.9")], "", found=False))
    assert said == "The highest rate scale that keeps 90 % within the limit of TTFT: 4, c."


def test_without_all_prices_the_fewest_gpus_are_told_as_such() -> None:
    found = [answered("a", 3, 4.77, "a100-80gb"), answered("a", 2, None, "h800")]
    assert headline(as_json(found, axis_of("gpus"), [goal("ttft:0.9")], "", found=False)) == (
        "The fewest GPUs (no price is known for h800) that keep 90 % within the limit of TTFT: a on 2 h800."
    )


def test_a_gpu_that_cannot_be_is_an_answer_of_none_among_others(file: Path, tmp_path: Path) -> None:
    text = ONE.replace("llama-3.1-8b", "qwen2.5-14b").replace("rate_per_s: 30", "rate_per_s: 8")
    file.write_text(text, encoding="utf-8")
    prober = Prober(file, tmp_path / "out", [goal("ttft:0.5")], jobs=1)
    tried = variants(["l4", "h100-sxm"], [], {})
    first, second = (answer for answer, _ in size_all(prober, tried, axis_of("gpus"), most_gpus=2, precision=0.1))
    assert first.best is None and "fits on no GPU" in first.why
    assert second.best is not None
    with pytest.raises(ConfigError, match="fits on no GPU"):
        list(size_all(prober, tried[:1], axis_of("gpus"), most_gpus=2, precision=0.1))


def test_of_equally_cheap_answers_the_one_that_attains_most_is_told() -> None:
    def answer(share: float, usd: float, value: float = 2) -> Answer:
        return Answer("", "", Attained(value, True, {"slo_attainment": share}, None, 1, False, usd_per_hour=usd), ())

    found = [answer(0.96, 4.0), answer(0.99, 4.0), answer(1.0, 8.0)]
    assert cheapest(found) is found[1]
    rates = [answer(1.0, 4.0, 1.5), answer(0.96, 4.0, 1.7)]
    assert to_take(rates, axis_of("rate")) is rates[1] and to_take(rates, axis_of("slo_scale")) is rates[0]
