"""report.html in a headless Chromium: it asks nobody for anything, writes nothing to the console, and its filters filter."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browserkit import DRIVER, MISSING, Browser, browser

from fineserve_sim.cluster import Fate
from fineserve_sim.experiment import run_experiment
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.against import Bill, against
from fineserve_sim.experiment.show.page.build import sweeps, system_looks, write_page
from fineserve_sim.experiment.show.page.curves import latency_traces
from fineserve_sim.experiment.show.page.first import verdict_of
from fineserve_sim.experiment.show.page.memory import Panel, _colours, _label
from fineserve_sim.experiment.show.page.overview import overview
from fineserve_sim.experiment.show.page.search import read_search, search_charts
from fineserve_sim.experiment.show.page.style import Looks, percent_range
from fineserve_sim.experiment.show.page.sweep_charts import sweep_charts, sweep_of
from fineserve_sim.experiment.show.timelines.stored import run_of

needs_browser = pytest.mark.skipif(not DRIVER and os.environ.get("FINESERVE_BROWSER") != "required", reason=MISSING)

ONES = np.ones(3)

EXPERIMENT = """\
fineserve: 1
title: Two models & <one> GPU
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 30}
  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 2}
workload: {lengths: {prompt_tokens: 1024, output_tokens: 8}, requests: 50}
slo: {ttft_s: 0.2}
systems: [fineserve, prism, {base: "static*", name: 50/50, title: "Static*"}, clairvoyant]
sweeps:
  - {name: rates, axes: {rate_scale: [1, 4], engine.token_budget: [2048, 4096]}}
  - {name: alone, at: {rate_scale: 3}}
seeds: 1
assumptions: [{what: lengths, value: null, why: "</script> none was given"}]
claims:
  - {id: more, paper: "> 1", measure: ratio, metric: goodput_per_s, of: fineserve, over: 50/50,
     at: {sweep: rates, rate_scale: 4, engine.token_budget: 2048}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the experiment, with its page."""
    out = tmp_path_factory.mktemp("page")
    (out / "page.yaml").write_text(EXPERIMENT, encoding="utf-8")
    run_experiment(out / "page.yaml", out, jobs=1, decisions=True)
    write_page([out], out / "report.html")
    return out


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def page(chromium: Browser, folder: Path) -> Browser:
    """The page, opened on a large screen on which every figure is drawn."""
    chromium.emulate(1280, 12000)
    chromium.console(), chromium.requests()
    return opened(chromium, folder / "report.html")


def opened(chromium: Browser, path: Path) -> Browser:
    chromium.open(path)
    chromium.wait_for("[...document.querySelectorAll('.figure')].every((box) => box.dataset.stale === 'no')")
    return chromium


def names(page: Browser, figure: str) -> list[str]:
    """The names of the series that a figure shows."""
    script = "return document.querySelector(`[data-figure='${arguments[0]}']`).data.map((trace) => trace.name);"
    found: list[str] = page.run(script, figure)
    return found


def choose(page: Browser, name: str, value: str) -> None:
    page.run(
        "const box = document.querySelector(`[data-filter=${arguments[0]}]`); box.value = arguments[1];"
        "box.dispatchEvent(new Event('change', {bubbles: true}));",
        name,
        value,
    )


def toggle(page: Browser, system: str) -> None:
    page.run("document.querySelector(`[data-filter=system][value='${arguments[0]}']`).click();", system)


def shown(page: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].filter((row) => !row.hidden).map((row) => row.textContent);"
    found: list[str] = page.run(script, selector)
    return found


@needs_browser
def test_nothing_leaves_the_page_and_nothing_goes_wrong_in_it(page: Browser) -> None:
    assert page.run("return document.querySelectorAll('.js-plotly-plot').length") > 10
    asked = {address for address in page.requests() if not address.startswith("chrome:")}
    assert {address for address in asked if not address.startswith("data:")} == {page.run("return location.href")}
    assert page.console() == []


@needs_browser
def test_a_system_that_is_switched_off_is_gone_from_figures_and_tables(page: Browser) -> None:
    assert names(page, "0/rates/ttft_attainment") == ["FineServe", "Prism", "Static*", "Clairvoyant bound"]
    toggle(page, "prism")
    assert names(page, "0/rates/ttft_attainment") == ["FineServe", "Static*", "Clairvoyant bound"]
    rows = shown(page, "tbody tr[data-system]") + shown(page, "details[data-system]")
    assert rows and not any(row.startswith("Prism") for row in rows)
    assert not any("Prism" in title for title in shown(page, "section[data-system]"))


@needs_browser
def test_a_model_has_its_own_numbers(page: Browser, folder: Path) -> None:
    def values() -> Any:
        return page.run("return document.querySelector(`[data-figure='0/alone/ttft_p99_s']`).data[0].y")

    cell = next(cell for cell in read_summary(folder)["cells"] if cell["sweep"] == "alone")
    together = values()
    choose(page, "model", "B")
    metric = cell["metrics"]["ttft_p99_s"]
    assert together == pytest.approx([metric["mean"]], rel=1e-3)
    assert values() == pytest.approx([metric["by_model"]["B"]["mean"]], rel=1e-3)
    stories = shown(page, "details[data-model]")
    assert all(", B, request" in story for story in stories)


@needs_browser
def test_a_place_has_its_own_latencies_memory_and_requests(page: Browser) -> None:
    places = page.run("return [...document.querySelector('[data-filter=place]').options].map((each) => each.text)")
    assert len(places) == 5
    told = []
    for number in range(2):
        choose(page, "place", str(number))
        told.append((shown(page, "details[data-place]"), shown(page, ".where")[0]))
        assert names(page, "0/latency/ttft")[-1] == "Limit, 0.2 s"
        assert (
            page.run("return document.querySelectorAll(`[data-figure='0/latency/ttft'] .legend .traces`).length") == 0
        )
        assert "A" in names(page, "0/memory/fineserve")
    assert told[0][0] != told[1][0]
    assert [where for _, where in told] == [f"At {place}." for place in places[:2]]


@needs_browser
def test_other_axes_of_a_sweep_are_chosen_beside_it(page: Browser) -> None:
    script = "const box = document.querySelector('[data-facet=rates]'); box.value = arguments[0];"
    script += "box.dispatchEvent(new Event('change', {bubbles: true}));"
    script += (
        "return document.querySelector(`[data-figure='0/rates/goodput_per_s']`).data.map((trace) => trace.meta.facet);"
    )
    assert set(page.run(script, "0")) == {0}
    assert set(page.run(script, "1")) == {1}


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(chromium: Browser, folder: Path, dark: bool) -> None:
    chromium.emulate(390, 844, dark=dark, phone=True)
    page = opened_on_phone(chromium, folder / "report.html")
    assert page.run("return document.documentElement.scrollWidth") == 390
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (max(json.loads(ground.replace("rgb(", "[").replace(")", "]"))) < 60) == dark
    text = page.run("return document.querySelector('.js-plotly-plot .xtick text').style.fill")
    assert (min(json.loads(text.replace("rgb(", "[").replace(")", "]"))) > 200) == dark
    assert page.console() == []


def opened_on_phone(chromium: Browser, path: Path) -> Browser:
    """Only figures near the screen are drawn."""
    chromium.open(path)
    chromium.run("document.querySelector('.figure').scrollIntoView()")
    drawn = "document.querySelectorAll('.js-plotly-plot .xtick').length"
    chromium.wait_for(f"{drawn} > 0")
    assert chromium.run("return document.querySelectorAll('.figure:not(.js-plotly-plot)').length") > 0
    return chromium


@pytest.mark.slow
@needs_browser
def test_several_folders_are_parts_with_filters_of_their_own(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    chromium.emulate(1280, 900)
    chromium.console()
    chromium.open(write_page([folder, folder], tmp_path / "both.html"))
    chromium.run("document.querySelectorAll('main')[1].scrollIntoView()")
    figure = "document.querySelector(`[data-figure='${args[0]}']`)"
    for name in ("0/rates/ttft_attainment", "1/rates/ttft_attainment"):
        chromium.run("document.querySelector(`[data-figure='${arguments[0]}']`).scrollIntoView()", name)
        chromium.wait_for(f"{figure}.dataset.stale === 'no'", name)
    toggle(chromium, "prism")
    chromium.run("document.querySelector('main').scrollIntoView()")
    chromium.wait_for(f"{figure}.dataset.stale === 'no'", "0/rates/ttft_attainment")
    assert "Prism" not in names(chromium, "0/rates/ttft_attainment")
    assert "Prism" in names(chromium, "1/rates/ttft_attainment")
    assert chromium.console() == []


def test_the_page_is_the_same_for_the_same_results_and_holds_plotly_once(folder: Path, tmp_path: Path) -> None:
    text = write_page([folder, folder], tmp_path / "again.html").read_text(encoding="utf-8")
    plotly = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    assert text.count(plotly) == 1
    assert write_page([folder], tmp_path / "one.html").read_bytes() == (folder / "report.html").read_bytes()
    assert str(folder) not in text


def test_texts_of_the_file_are_texts_of_the_page(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Two models &amp; &lt;one&gt; GPU" in text and "<one>" not in text
    assert "&lt;/script&gt; none was given" in text


def test_the_page_tells_claims_assumptions_limits_step_times_and_how_to_run_it_again(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    for told in ("Claims", "Assumptions", "Models and limits", "Where step times come from", "Run it again"):
        assert f"<h2>{told}</h2>" in text
    assert "fineserve-sim run experiment.yaml" in text and "0.2</td>" in text and "measured" in text
    assert "Dispatch to engine" in text  # a story from the decision log


def test_a_run_of_a_million_requests_stays_small(folder: Path, tmp_path: Path) -> None:
    """The stored runs of the first cell repeated to a million requests and a day of samples: what is embedded is aggregated."""
    large = tmp_path / "large"
    shutil.copytree(folder, large)
    summary = read_summary(large)
    for cell in summary["cells"][:2]:
        for suffix, rows in (("parquet", 1_000_000), ("timeline.parquet", 86_400)):
            path = large / "cells" / f"{cell['runs'][0]}.{suffix}"
            repeat(path, rows)
    page = write_page([large], large / "report.html")
    assert page.stat().st_size < 10_000_000
    assert len(run_of(large, summary["cells"][0]).data.arrival_s) == 1_000_000


def repeat(path: Path, rows: int) -> None:
    table = pq.read_table(path)
    found = table.take(pa.array(np.resize(np.arange(len(table)), rows)))
    if "time_s" in found.column_names:
        found = found.set_column(0, "time_s", pa.array(np.arange(float(rows))))
    pq.write_table(found, path)


def test_the_page_costs_less_than_two_seconds(folder: Path, tmp_path: Path) -> None:
    def cpu_s() -> float:
        start_s = time.process_time()
        write_page([folder], tmp_path / "page.html")
        return time.process_time() - start_s

    assert min(cpu_s() for _ in range(3)) < 2.0


def test_systems_at_one_place_stand_side_by_side_and_a_bound_is_one_of_attainments_alone(folder: Path) -> None:
    summary = read_summary(folder)
    cells = [cell | {"sweep": cell["system"]} for cell in summary["cells"] if cell["sweep"] == "alone"]
    (sweep,) = sweeps(summary | {"cells": cells})
    charts = sweep_charts(sweep, system_looks(summary))
    assert [trace["name"] for trace in charts["slo_attainment"]["data"] if trace["visible"]][-1] == "Clairvoyant bound"
    for metric in ("goodput_per_s", "decode_throughput_tokens_per_s", "ttft_p99_s"):
        assert {trace["meta"]["system"] for trace in charts[metric]["data"]} == {"fineserve", "prism", "50/50"}
    assert not charts["slo_attainment"]["layout"]["xaxis"]["showticklabels"]  # the legend names them
    assert re.search(r"Clairvoyant bound</td>.*?–</td>", overview(cells))


def test_a_percentile_of_requests_that_never_got_so_far_says_so(folder: Path) -> None:
    cells = [cell for cell in read_summary(folder)["cells"] if cell["sweep"] == "alone"][:2]
    lost = cells[0]["metrics"] | {"ttft_p99_s": cells[0]["metrics"]["ttft_p99_s"] | {"mean": None, "half_width": None}}
    cells[0] |= {"metrics": lost, "misses": cells[0]["misses"] | {"dropped": 5}}
    charts = sweep_charts(sweep_of("alone", cells), Looks(cell["system"] for cell in cells), ())
    first = charts["ttft_p99_s"]["data"][0]
    assert (first["text"], first["y"]) == (["never"], [0])
    assert "never</td>" in overview(cells)


def test_the_first_screen_is_a_verdict_with_its_colour_and_a_box_a_gpu(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    first = text[text.index('<section class="first') :].partition("</section>")[0]
    summary = read_summary(folder)
    assert first.startswith(f'<section class="first is-{verdict_of(summary, None)}">')
    assert first.count('class="gpu') == 2 and "GPU 0" in first and first.count('<i class="weights"') == 2 + 1
    assert text.index('class="first') < text.index("<h2>The answer in full</h2>") < text.index("js-plotly-plot")


def answered(holds: bool, sure: bool, found: Any = None) -> dict[str, Any]:
    search = {} if found is None else {"search": {"gpus": found}}
    return {"answer": {"choice": {"holds": holds, "margins": {"slo_attainment": {"sure": sure}}}, **search}}


def test_the_colour_of_a_verdict_is_green_only_beyond_the_interval() -> None:
    kept = {"value": 9, "margins": {"slo_attainment": {"sure": True}}}
    assert verdict_of(answered(True, True), None) == "good"
    assert verdict_of(answered(True, False), None) == "half"
    assert verdict_of(answered(False, True), None) == "bad"
    assert verdict_of(answered(False, True, {"value": None}), None) == "bad"
    assert verdict_of(answered(False, True, kept), None) == "good"  # on more GPUs than were asked for
    assert verdict_of(answered(True, True), {"systems": [{"answer": None}]}) == "bad"


def test_what_it_costs_against_dedicated_gpus_is_one_sentence() -> None:
    own = Bill("Dedicated", 13, 45.37, 0.999)
    assert against(Bill("FineServe", 8, 27.92), own) == (
        "One GPU (group) a model: 13 GPUs, $45.37 an hour, which keeps 99.9 % within limits. "
        "FineServe on 8, $27.92, costs 38 % less."
    )
    assert against(Bill("X", 14, 48.86), own).endswith("costs 8 % more.")
    assert against(Bill("X", 1, None), own._replace(kept=None)) == (
        "One GPU (group) a model: 13 GPUs. X on 1 takes 92 % fewer."
    )


def test_a_line_says_where_a_percentile_never_comes(folder: Path) -> None:
    """The series of a system that loses requests is there, above all values, and does not vanish beside the worst one."""
    cells = [cell for cell in read_summary(folder)["cells"] if cell["sweep"] == "rates"]
    cells = [cell for cell in cells if cell["axes"]["engine.token_budget"] == 2048]
    for cell in cells:
        if cell["system"] == "fineserve":
            lost = cell["metrics"]["ttft_p99_s"] | {"mean": None, "half_width": None}
            cell |= {"metrics": cell["metrics"] | {"ttft_p99_s": lost}, "misses": cell["misses"] | {"dropped": 5}}
    chart = sweep_charts(sweep_of("rates", cells), Looks(cell["system"] for cell in cells))["ttft_p99_s"]
    (never,) = [
        trace for trace in chart["data"] if trace["name"] == "FineServe: never" and trace["meta"]["model"] == ""
    ]
    others = [
        y
        for trace in chart["data"]
        if trace["meta"] == {"system": "prism", "model": "", "facet": 0}
        for y in trace["y"]
    ]
    assert never["x"] == [1, 4] and min(never["y"]) > max(others) and "never" in never["text"]
    lost_everywhere = [cell for cell in cells if cell["system"] == "fineserve"]
    alone = sweep_charts(sweep_of("rates", lost_everywhere), Looks(["fineserve"]))
    assert [trace["name"] for trace in alone["ttft_p99_s"]["data"] if trace["visible"]] == ["FineServe: never"]


def test_an_axis_of_percent_shows_what_differs() -> None:
    assert percent_range([20.0, 99.0]) == (0.0, 104.0)
    assert percent_range([97.3, 98.8]) == (94.0, 100.4)
    assert percent_range([], 99.0) == (95.0, 100.25) and percent_range([], 50.0) == (0.0, 104.0)


def test_models_of_one_gpu_have_colours_of_their_own_and_labels() -> None:
    names = [f"m{number}" for number in range(12)]
    panels = [
        Panel("GPU 0", 9.0, {names[0]: ONES, names[8]: ONES}),
        Panel("GPU 1", 9.0, dict.fromkeys(names[2:6], ONES)),
    ]
    colours = _colours([Panel("Requests", None, dict.fromkeys(names, ONES)), *panels], Looks(names))
    assert Looks(names).colour(names[0]) == Looks(names).colour(names[8])  # eight colours
    assert colours[names[0]] != colours[names[8]] and len({colours[name] for name in names[2:6]}) == 4
    assert f"color:{colours['m8']}" in _label(panels[0], "", colours)["text"]


def test_series_beyond_eight_have_their_names_at_their_ends() -> None:
    answers = [
        {"title": f"S{number}", "gpu": "h100-sxm", "tp": None, "changes": [], "answer": None, "out_of_reach": None}
        | {
            "probes": [
                {"value": 1, "shares": {"ttft_attainment": 0.9}},
                {"value": 2, "shares": {"ttft_attainment": 1.0}},
            ]
        }
        for number in range(9)
    ]
    found = {"systems": answers, "targets": {"ttft_attainment": 0.99}, "title": "GPUs"}
    data = search_charts(found)["search/ttft_attainment"]["data"]
    assert [trace["text"] for trace in data] == [["", f"S{number}"] for number in range(9)]
    few = search_charts(found | {"systems": answers[:8]})["search/ttft_attainment"]["data"]
    assert not any("text" in trace for trace in few)


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no summary\.json here"):
        write_page([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_time_a_token_is_of_requests_of_several_tokens_whatever_became_of_them(folder: Path) -> None:
    """As its percentiles in summary.json: a request of one token has none, dropped or finished."""
    cell = read_summary(folder)["cells"][0]
    data = run_of(folder, cell).data
    dropped = replace(
        data,
        output_tokens=np.where(np.arange(len(data.fate)) < 10, 1, data.output_tokens),
        generated_tokens=np.where(np.arange(len(data.fate)) < 10, 1, data.generated_tokens),
        fate=np.full_like(data.fate, Fate.DROPPED),
        finish_s=np.where(np.arange(len(data.fate)) < 20, np.nan, data.finish_s),
    )
    curves = latency_traces("tpot", {"x": dropped}, {"x": cell}, Looks([cell["system"]]))
    assert curves[0]["y"][-1] == pytest.approx(100 * 30 / 40, rel=1e-3)


@pytest.mark.parametrize(("text", "told"), [("{", "damaged"), ('{"systems": []}', "an older version")])
def test_a_search_that_cannot_be_shown_is_made_again(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "size.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"size.json: .*{told}; search again"):
        read_search(tmp_path)
