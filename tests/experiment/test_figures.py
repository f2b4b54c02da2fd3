"""Figures are drawn from a results folder alone: which files, the same bytes again, and clear refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fineserve_sim.experiment.show.figures import default_figures, draw
from fineserve_sim.experiment.show.labels import axis_label, axis_text, distinct, interval, number, quantity
from fineserve_sim.experiment.show.placement_figure import placement_figure
from fineserve_sim.experiment.show.plot_style import SystemStyles, house_style, look_at
from fineserve_sim.experiment.show.sweep_figure import sweep_figure
from fineserve_sim.experiment.show.timeline_figure import Timeline, timeline_figure

SYSTEMS = {"fineserve": "FineServe", "prism*": "Prism*", "static*": "Static*"}


def cell(sweep: str, system: str, axes: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as summary.json holds it; later systems do worse, and a larger SLO scale does better."""
    worse = list(SYSTEMS).index(system)
    attainment = 1 - math.exp(-axes["slo_scale"] / (6 + 5 * worse)) - 0.05 * (axes["load"] == "B")
    return {
        "sweep": sweep,
        "system": system,
        "title": SYSTEMS[system],
        "axes": dict(axes),
        "seeds": 3,
        "requests": 2400,
        "runs": [],
        "metrics": {
            "ttft_attainment": {"mean": attainment, "half_width": 0.02 + 0.01 * worse},
            "decode_throughput_tokens_per_s": {"mean": 2000.0 * attainment, "half_width": None},
        },
        "flags": [],
    }


def sweep_cells(sweep: str, slo_scales: list[float], loads: list[str]) -> list[dict[str, Any]]:
    points = product(SYSTEMS, slo_scales, loads)
    return [cell(sweep, s, {"slo_scale": scale, "rate_scale": 8, "load": load}) for s, scale, load in points]


def results(folder: Path, cells: list[dict[str, Any]], figures: list[dict[str, Any]] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"title": "End to end on one node", "placements": [], "warnings": [], "claims": []}
    summary = {"schema": 2, **whole, "cells": cells}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"fineserve": 1, "figures": figures}), encoding="utf-8")
    return folder


SLO_FIGURE = {
    "name": "slo_scale",
    "sweep": "slo",
    "x": "slo_scale",
    "panels": ["ttft_attainment", "decode_throughput_tokens_per_s"],
    "columns": "load",
}


def test_each_figure_of_the_file_becomes_a_png_and_an_svg(tmp_path: Path) -> None:
    folder = results(tmp_path, sweep_cells("slo", [5, 10, 20, 30], ["A", "B"]), [SLO_FIGURE])
    written = draw(folder)
    assert [path.relative_to(folder).as_posix() for path in written] == [
        "figures/slo_scale.png",
        "figures/slo_scale.svg",
    ]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in written[1].read_bytes()


def test_the_same_results_give_the_same_bytes_whatever_the_users_settings(tmp_path: Path) -> None:
    cells = sweep_cells("slo", [5, 10], ["A", "B"])
    first = [path.read_bytes() for path in draw(results(tmp_path / "first", cells, [SLO_FIGURE]))]
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "mine", "axes.grid": False}):
        second = [path.read_bytes() for path in draw(results(tmp_path / "second", cells, [SLO_FIGURE]))]
    assert first == second


def test_the_default_set_is_every_sweep_over_its_first_varying_axis(tmp_path: Path) -> None:
    cells = (
        sweep_cells("slo", [5, 10], ["A", "B"])
        + sweep_cells("loads", [20], ["A", "B"])
        + sweep_cells("point", [20], ["A"])
    )
    assert [(entry["sweep"], entry["x"]) for entry in default_figures(cells)] == [
        ("slo", "slo_scale"),
        ("loads", "load"),
        ("point", None),
    ]
    names = {path.name for path in draw(results(tmp_path, cells, None))}
    assert names == {f"{sweep}.{kind}" for sweep in ("slo", "loads", "point") for kind in ("png", "svg")}


def test_panels_columns_labels_and_legend_say_what_is_drawn() -> None:
    with house_style():
        figure = sweep_figure(
            sweep_cells("slo", [5, 10, 20, 30], ["A", "B"]),
            x="slo_scale",
            panels=["ttft_attainment", "decode_throughput_tokens_per_s"],
            columns="load",
            title="End to end",
            styles=SystemStyles(SYSTEMS),
        )
    top, bottom = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in top] == ["Load A", "Load B"]
    assert top[0].get_ylabel() == "TTFT SLO attainment (%)"
    assert bottom[0].get_ylabel() == "Decode throughput (tokens/s)"
    assert {axes.get_xlabel() for axes in bottom} == {"SLO scale"}
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == list(SYSTEMS.values())
    line = top[0].containers[0].lines[0]
    assert line.get_ydata() == pytest.approx([100 * (1 - math.exp(-scale / 6)) for scale in (5, 10, 20, 30)])


def test_markers_of_numbers_that_hardly_differ_are_whole() -> None:
    cells = sweep_cells("slo", [5, 10], ["A"])
    for place, each in enumerate(cells):
        each["metrics"]["decode_throughput_tokens_per_s"]["mean"] = 4000.0 + place
    with house_style():
        panels = ["decode_throughput_tokens_per_s"]
        figure = sweep_figure(
            cells, x="slo_scale", panels=panels, columns=None, title="Even", styles=SystemStyles(SYSTEMS)
        )
    assert figure.axes[0].get_ylim()[0] == 0 and figure.axes[0].get_ylim()[1] > 1.04 * 4000


def test_a_system_keeps_its_style_when_others_leave() -> None:
    both, alone = SystemStyles(["mine", "fineserve", "prism*"]), SystemStyles(["prism*"])
    assert (both.colour("prism*"), both.marker("prism*")) == (alone.colour("prism*"), alone.marker("prism*"))
    assert len({both.colour(name) for name in ("mine", "fineserve", "prism*")}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"panels": ["ttft_atainment"]}, 'no metric "ttft_atainment"; did you mean "ttft_attainment"?'),
        ({"x": "slo_scal"}, 'no axis "slo_scal"; did you mean "slo_scale"?'),
        ({"sweep": "rate"}, 'no results of sweep "rate"'),
        ({"systems": ["nobody"]}, "for the systems it asks for"),
    ],
)
def test_a_figure_that_asks_for_what_is_not_there_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = results(tmp_path, sweep_cells("slo", [5, 10], ["A"]), [SLO_FIGURE | change])
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        draw(folder)
    assert "\n" not in str(refused.value)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no summary\.json here"):
        draw(tmp_path)


def store_timeline(folder: Path, key: str) -> None:
    """Two engines of model A and one of B on two GPUs, sampled three times."""
    columns = {"time_s": [0.0, 1.0, 2.0], "waiting.0": [1, 2, 3], "waiting.1": [10, 20, 30], "waiting.2": [5, 5, 5]}
    columns |= {f"kv_used_bytes.{engine}": [0, 2**30, 2**31] for engine in range(3)}
    columns |= {f"gpu_free_bytes.{gpu}": [2**30 * (gpu + 1)] * 3 for gpu in range(2)}
    cells = folder / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), cells / f"{key}.timeline.parquet")
    meta = {"models": ["A", "B"], "engine_models": ["B", "A", "A"], "gpus": 2, "kv_capacity_bytes": [2**32, 2**32]}
    (cells / f"{key}.json").write_text(json.dumps(meta), encoding="utf-8")


def test_a_timeline_adds_up_the_engines_of_a_model(tmp_path: Path) -> None:
    store_timeline(tmp_path, "run")
    timeline = Timeline(tmp_path, "run")
    assert timeline.kv_capacity_bytes == 2**33
    assert {name: list(values) for name, values in timeline.series("waiting").items()} == {
        "Model A": [15, 25, 35],
        "Model B": [1, 2, 3],
    }
    assert list(timeline.series("kv_used_bytes")["Model A"]) == [0, 2, 4]
    assert {name: list(values) for name, values in timeline.series("gpu_free_bytes").items()} == {
        "GPU 0": [1, 1, 1],
        "GPU 1": [2, 2, 2],
    }


def test_a_timeline_shows_what_clients_see(tmp_path: Path) -> None:
    """Three requests of A in two windows, the last unfinished; one of B that yields 9 tokens in 1.5 s after the first."""
    store_timeline(tmp_path, "run")
    columns = {"model": [0, 0, 1, 0], "arrival_s": [0.0, 1.0, 0.5, 3.0], "output_tokens": [1, 5, 10, 4]}
    columns |= {"first_token_s": [0.5, 1.5, 0.5, math.nan], "finish_s": [0.5, 2.5, 2.0, math.nan]}
    pq.write_table(pa.table(columns), tmp_path / "cells" / "run.parquet")
    ttft_s = Timeline(tmp_path, "run").series("windowed_ttft_s")
    assert ttft_s["Model A"][:2].tolist() == [0.5, 0.5] and math.isnan(ttft_s["Model A"][2])
    assert ttft_s["Model B"][0] == 0.0
    output = Timeline(tmp_path, "run").series("output_tokens_per_s")
    assert output["Model A"].tolist() == [0.0, 0.0, 4.0]
    assert output["Model B"].tolist() == pytest.approx([0.0, 6.0, 0.0])


def test_a_timeline_figure_has_a_column_a_system_at_one_place(tmp_path: Path) -> None:
    cells = sweep_cells("slo", [5, 10], ["A"])
    for entry in cells:
        key = f"{entry['system'][:3]}-{entry['axes']['slo_scale']}"
        entry["runs"] = [key, "another seed"]
        store_timeline(tmp_path, key)
    with house_style():
        figure = timeline_figure(
            cells, {"slo_scale": 10}, panels=["kv_used_bytes", "waiting"], title="KV", results_dir=tmp_path
        )
    assert [axes.get_title() for axes in figure.axes[:3]] == list(SYSTEMS.values())
    assert figure.axes[0].get_ylabel() == "KV cache in use (GiB)"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["Model A", "Model B", "KV capacity of the cluster"]
    with pytest.raises(ValueError, match="no cell is at SLO scale 7"):
        timeline_figure(cells, {"slo_scale": 7}, panels=["waiting"], title="KV", results_dir=tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(20, "20"), (0.5, "0.5"), (91.2345, "91.2"), (1234.5, "1,234"), (0.00012345, "0.000123"), (None, "–"), ("A", "A")],
)
def test_numbers_are_short(value: object, text: str) -> None:
    assert number(value) == text


def test_unknown_names_are_read_by_their_unit() -> None:
    assert quantity("ttft_p95_s").text == "TTFT p95 (s)"
    assert quantity("engine.token_budget").text == "Token budget"
    assert quantity("link_bytes").scale == 2**-30
    assert distinct([20, 5, 20]) == [5, 20]
    assert distinct(["B", "A", "B"]) == ["B", "A"]


@pytest.mark.parametrize(
    ("axis", "value", "label", "text"),
    [
        ("rate_scale", 2.0, "Rate scale", "Rate scale 2"),
        ("rate_scale", 1.2345, "Rate scale", "Rate scale 1.2345"),
        ("load", "B", "Load", "Load B"),
        ("cluster.count", 8, "GPUs", "GPUs 8"),
        ("cluster.gpu", "h100-sxm", "GPU", "GPU h100-sxm"),
        ("slo.ttft_s", 0.5, "TTFT (s)", "TTFT 0.5 s"),
        ("faults.0.time_s", 50, "Fault 0 time (s)", "Fault 0 time 50 s"),
        ("models.1.rate_per_s", 4, "Model 1 rate (1/s)", "Model 1 rate 4/s"),
        ("engine.context_bytes", 2**29, "Context bytes", "Context bytes 5.36871e+08"),
        ("cluster.network_bytes_per_s", 25e9, "Network (bytes/s)", "Network 2.5e+10 bytes/s"),
    ],
)
def test_an_axis_says_what_it_counts_and_in_which_unit(axis: str, value: Any, label: str, text: str) -> None:
    assert (axis_label(axis), axis_text(axis, value)) == (label, text)


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (1.4567, 0.376, "1.46 ± 0.38"),
        (2345.6, 12.3, "2,346 ± 12"),
        (0.0, 0.5, "0.000 ± 0.500"),
        (3.14159, None, "3.14"),
        (None, None, "–"),
        (1.5e9, 2.0, "1.5e+09 ± 2"),
    ],
)
def test_a_half_width_has_the_decimals_of_its_mean(mean: float | None, half_width: float | None, text: str) -> None:
    assert interval(mean, half_width) == text


def equal_cells(slo_scales: list[float]) -> list[dict[str, Any]]:
    """Cells of systems that all do the same."""
    cells = sweep_cells("slo", slo_scales, ["A"])
    return [entry | {"metrics": cells[0]["metrics"]} for entry in cells]


def test_series_differ_in_marker_and_dashes_and_hatching() -> None:
    styles = SystemStyles([f"system {number}" for number in range(6)])
    names = [*SYSTEMS, "dedicated", *(f"system {number}" for number in range(6))]
    assert len({(styles.marker(name), styles.dashes(name)) for name in names}) == len(names) == 10
    assert len({styles.hatch(name) for name in names}) == len(names)
    assert len({(look_at(place)["marker"], look_at(place)["linestyle"]) for place in range(60)}) == 60


def test_equal_series_stand_side_by_side_and_lie_in_one_another() -> None:
    with house_style():
        figure = sweep_figure(
            equal_cells([5, 10, 20]), x="slo_scale", panels=["ttft_attainment"], columns=None, title="Equal",
            styles=SystemStyles(SYSTEMS),
        )  # fmt: skip
    figure.draw_without_rendering()
    lines = [container.lines[0] for container in figure.axes[0].containers]
    at_px = [line.get_transform().transform(line.get_xydata())[0] for line in lines]
    assert len({round(x, 3) for x, _ in at_px}) == len(SYSTEMS) and len({round(y, 3) for _, y in at_px}) == 1
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == len(widths)


def drawn(cells: list[dict[str, Any]], **asked: Any) -> Any:
    """The figure of a sweep, laid out."""
    wanted: dict[str, Any] = {"x": None, "panels": ["ttft_attainment"], "columns": None, "title": "End to end"}
    with house_style():
        figure = sweep_figure(cells, **(wanted | asked), styles=SystemStyles(cell["system"] for cell in cells))
    figure.draw_without_rendering()
    return figure


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]


def assert_nothing_is_cut(figure: Any) -> None:
    """All that is drawn lies on the canvas, in inches."""
    box, (width_in, height_in) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= -0.01 and box.y0 >= -0.01 and box.x1 <= width_in + 0.01 and box.y1 <= height_in + 0.01


def test_no_text_is_cut_however_long() -> None:
    long = "A title that goes on and on, as those do that people write who want to say everything at once, and more"
    cells = [entry | {"title": f"{entry['title']} with a variant's long name"} for entry in equal_cells([5, 10])]
    cells = [entry | {"ttft_slo_s": {"a-model-of-a-long-name": 1.0, "another-of-a-long-name": 2.0}} for entry in cells]
    assert_nothing_is_cut(drawn(cells, x="slo_scale", title=long))
    assert_nothing_is_cut(drawn(cells, x=None, title=long))


def test_labels_of_near_places_do_not_touch() -> None:
    figure = drawn(equal_cells([1, 1.1, 1.2, 2, 8]), x="slo_scale")
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_the_note_has_gpus_and_limits_in_seconds_and_no_scale_of_an_absolute_one() -> None:
    absolute = {"cluster": {"gpu": "h100-sxm", "count": 2}, "ttft_slo_s": {"A": 0.5, "B": 0.5}, "derived": False}
    said = [text.replace("\n", " ") for text in texts(drawn([entry | absolute for entry in equal_cells([1])]))]
    assert "2 h100-sxm, Rate scale 8, Load A, limits: TTFT 0.5 s, 3 seeds, whiskers: 95 % intervals" in said


def test_bars_name_their_gpus_where_these_differ_and_a_bound_has_attainment_alone() -> None:
    cells = equal_cells([20])
    cells = [entry | {"cluster": {"gpu": "x", "count": 1 + n}, "gpus": [{}]} for n, entry in enumerate(cells)]
    cells[2]["gpus"] = []
    figure = drawn(cells, panels=["ttft_attainment", "decode_throughput_tokens_per_s"])
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["FineServe (1 GPU)", "Prism* (2 GPUs)", "Static*"]
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert not any(map(math.isnan, heights[0])) and [math.isnan(height) for height in heights[1]] == [
        False,
        False,
        True,
    ]


def test_whiskers_are_seen_on_every_bar() -> None:
    (axes,) = drawn(equal_cells([20])).axes
    assert {tuple(colour) for lines in axes.collections for colour in lines.get_color()} == {(0.0, 0.0, 0.0, 1.0)}
    assert all(bar.get_facecolor()[3] < 0.5 for bar in axes.patches)


def test_a_percentile_without_a_number_says_never_and_limits_are_drawn() -> None:
    cells = equal_cells([20])
    found = {"ttft_p99_s": {"mean": 0.2, "half_width": None}}
    cells = [entry | {"metrics": found, "ttft_slo_s": {"A": 0.5}} for entry in cells]
    cells[1]["metrics"] = {"ttft_p99_s": {"mean": None, "half_width": None}}
    figure = drawn(cells, panels=["ttft_p99_s"])
    assert texts(figure).count("never") == 1 and "TTFT limit, 0.5 s" in texts(figure)


def test_sweeps_at_one_place_are_one_figure_where_no_system_would_hide_itself() -> None:
    cells = sweep_cells("run", [20], ["A"])
    more = {"sweep": "more", "axes": cells[0]["axes"] | {"cluster.count": 4}}
    (entry,) = default_figures([*cells, cells[0] | more | {"system": "dedicated"}])
    assert (entry["name"], entry["x"]) == ("systems", None)
    assert [entry["name"] for entry in default_figures([*cells, cells[0] | more])] == ["run", "more"]


def placed_cell() -> dict[str, Any]:
    gib = 2**30
    gpu = {"usable_bytes": 72 * gib, "weights_bytes": 45 * gib, "kv_bytes": 24 * gib, "kv_left_bytes": 20 * gib}
    gpu |= {"kv_least_bytes": 1, "busy": 0.9, "compute": 0.5, "bandwidth": 0.6, "waiting": 0.1}
    empty = gpu | {"gpu": 1, "models": [], "weights_bytes": 0, "kv_bytes": 72 * gib, "kv_left_bytes": None}
    cell = equal_cells([20])[0] | {"cluster": {"gpu": "h100-sxm", "count": 2}, "models_move": False, "derived": False}
    cell["metrics"] = cell["metrics"] | {"arrival_rate_per_s": {"mean": 5.0, "half_width": None}}
    cell |= {"gpus": [gpu | {"gpu": 0, "models": ["chat", "code"]}, empty], "requests": 10}
    lost = {"model": "big", "why": "it needs 131.4 GiB, the most left on a GPU is 72.0 GiB"}
    return cell | {"unplaced": [lost], "models": {"big": {"requests": 5}}}


def test_the_placement_shows_each_gpu_and_what_has_no_place() -> None:
    with house_style():
        figure = placement_figure(placed_cell(), "End to end")
    figure.draw_without_rendering()
    shown = texts(figure)
    assert "GPU 0\nchat, code" in shown and "GPU 1\nno model" in shown
    assert any(text.startswith("UNPLACED on 2 h100-sxm (") for text in shown)
    memory = figure.axes[0]
    first = [container.patches[0].get_width() for container in memory.containers]
    assert first == pytest.approx([45, 3, 4, 20])
    assert sum(container.patches[1].get_width() for container in memory.containers) == pytest.approx(72)
    assert_nothing_is_cut(figure)


def test_figures_of_another_experiment_go_and_a_full_disk_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = results(tmp_path, sweep_cells("slo", [5, 10], ["A"]), [SLO_FIGURE])
    draw(folder)
    draw(results(tmp_path, sweep_cells("slo", [5, 10], ["A"]), [SLO_FIGURE | {"name": "other"}]))
    assert {path.name for path in (folder / "figures").iterdir()} == {"other.png", "other.svg"}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    fresh = results(tmp_path / "fresh", sweep_cells("slo", [5, 10], ["A"]), [SLO_FIGURE])
    with pytest.raises(ValueError, match="results cannot be written: No space left on device"):
        draw(fresh)
    assert not (fresh / "figures").exists()
