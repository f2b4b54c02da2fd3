"""One self-contained page of results folders: report.html.

Everything is in the file: tables and texts as HTML, figures as data, Plotly's JavaScript once. It asks nothing of the network
(its content security policy forbids it) and holds no time or path of its own, so that the same results give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fineserve_sim import __version__
from fineserve_sim.experiment.file.document import read_yaml
from fineserve_sim.experiment.results.answer import chosen_cell, place_of, side_by_side
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.show.page import sections
from fineserve_sim.experiment.show.page.by_place import ByPlace, by_place
from fineserve_sim.experiment.show.page.first import first_screen
from fineserve_sim.experiment.show.page.html import Html, joined, tag
from fineserve_sim.experiment.show.page.legend import legend
from fineserve_sim.experiment.show.page.overview import overview
from fineserve_sim.experiment.show.page.places import Places, places_of
from fineserve_sim.experiment.show.page.search import read_search, search_charts, search_looks, search_section
from fineserve_sim.experiment.show.page.style import Looks, Spec
from fineserve_sim.experiment.show.page.sweep_charts import Sweep, sweep_charts, sweep_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_FEW_CELLS = 12
_LIBRARY = "/* the library that draws */"
"""Where it goes in the document: it is much longer than all else, so that it is written by itself."""

_MODELS_FIRST_COLOUR = 3
"""Models start at other colours than systems, so that nobody takes one for the other."""


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of these results folders. Raises ValueError for a folder without results, OSError from the disk."""
    parts: list[Html] = []
    figures: dict[str, Spec] = {}
    for index, folder in enumerate(folders):
        part, own = _part(folder, index)
        parts.append(part)
        figures |= own
    title = _title(folders[0]) if len(folders) == 1 else f"{len(folders)} experiments"
    return write_document(path, title, joined(parts), figures)


def write_document(path: Path, title: str, body: Html, figures: Mapping[str, Spec]) -> Path:
    """Write a page that needs no network: ``main`` elements, and figures by name. Raises OSError from the disk."""
    before, _, after = _document(title, body, figures).rpartition(_LIBRARY)
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(before)
        file.write(files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8"))
        file.write(after)
    return path


def _title(folder: Path) -> str:
    searched = read_search(folder)
    return str(read_summary(folder)["title"] if searched is None else searched["experiment"])


def _document(title: str, body: Html, figures: Mapping[str, Spec]) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Html(_own("page.css"))),
    )
    data = Html(json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"))
    scripts = [
        tag("script", data, type="application/json", id="figures"),
        tag("script", Html(_LIBRARY)),
        tag("script", Html(_own("page.js"))),
    ]
    foot = tag("footer", tag("p", f"FineServe {__version__}"))
    return "<!doctype html>\n" + tag("html", head, tag("body", body, foot, *scripts), lang="en") + "\n"


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _part(folder: Path, index: int) -> tuple[Html, dict[str, Spec]]:
    """The part of one folder and its figures by their names in the page."""
    searched, prefix = read_search(folder), f"{index}/"
    if searched is not None and not searched["found"]:
        return _nothing_held(searched, prefix)
    summary, resolved = read_summary(folder), read_yaml(folder / "resolved.yaml").data
    places = places_of(summary["cells"], chosen_cell(summary))
    models = Looks([model["id"] for model in resolved["models"]], _MODELS_FIRST_COLOUR)
    here = by_place(folder, places, resolved, system_looks(summary), models)
    swept = sweep_figures(folder, summary)
    charts = {} if searched is None else search_charts(searched)
    first = first_screen(summary, searched)
    inner = [
        tag("h1", summary["title"]),
        *([] if first is None else [first]),
        sections.setting(summary, resolved),
        _filters(summary, resolved, places),
        *([] if searched is None else [_search(searched, prefix)]),
        *_sections(folder, summary, resolved, here, swept, prefix),
    ]
    figures = {prefix + name: spec for name, spec in (swept | here.figures | charts).items()}
    return tag("main", *inner, class_="run"), figures


def _search(searched: Mapping[str, Any], prefix: str) -> Html:
    """The findings of a search, before the results of its choice."""
    figures = {prefix + name: spec for name, spec in search_charts(searched).items()}
    looks = search_looks(searched)
    key = legend(looks, {name: name for name in looks.names}, filtered=False)
    return section("Search", search_section(searched), key, grid(figures))


def _nothing_held(searched: Mapping[str, Any], prefix: str) -> tuple[Html, dict[str, Spec]]:
    """The part of a search that found nothing to run in full: no results, and so no filters that choose anything."""
    figures = {prefix + name: spec for name, spec in search_charts(searched).items()}
    first = first_screen(None, searched)
    inner = [tag("h1", searched["experiment"]), *([] if first is None else [first]), no_filters()]
    return tag("main", *inner, _search(searched, prefix), class_="run"), figures


def no_filters() -> Html:
    """The filters that the page expects in every part, with nothing to choose."""
    empty = [tag("select", tag("option", "all", value=""), data_filter=name) for name in ("model", "place")]
    return tag("nav", *empty, hidden=True)


def _filters(summary: Mapping[str, Any], resolved: Mapping[str, Any], places: Places) -> Html:
    """The filters of the whole part: systems, one model or all, one place."""
    titles = {cell["system"]: cell["title"] for cell in summary["cells"]}
    chips = [
        tag(
            "label", tag("input", type="checkbox", checked=True, value=system, data_filter="system"), tag("span", title)
        )
        for system, title in titles.items()
    ]
    chosen = [tag("option", "all models", value="")]
    chosen += [tag("option", model["id"], value=model["id"]) for model in resolved["models"]]
    options = [
        tag("option", place.title or "the only one", value=number, selected=number == places.first)
        for number, place in enumerate(places.shown)
    ]
    return tag(
        "nav",
        tag("div", *chips, class_="chips"),
        tag("label", "Model ", tag("select", *chosen, data_filter="model")),
        tag("label", "Place ", tag("select", *options, data_filter="place"), hidden=len(options) < 2),
        aria_label="Filters",
    )


def _sections(
    folder: Path,
    summary: Mapping[str, Any],
    resolved: Mapping[str, Any],
    here: ByPlace,
    swept: Mapping[str, Spec],
    prefix: str,
) -> Iterator[Html]:
    if found := sections.answer(summary):
        yield section("The answer in full", found)
    for sweep in sweeps(summary):
        own = {prefix + name: spec for name, spec in swept.items() if name.rpartition("/")[0] == sweep.name}
        facets = [
            tag("option", facet, value=number, selected=number == sweep.first(chosen_cell(summary)))
            for number, facet in enumerate(sweep.facets)
        ]
        chosen = tag("label", "at ", tag("select", *facets, data_facet=sweep.name), hidden=len(facets) < 2)
        title = "Systems" if side_by_side(sweep.cells) else f"Sweep {sweep.name}"
        key = legend(system_looks(summary), {cell["system"]: cell["title"] for cell in sweep.cells})
        yield section(title, chosen, key, grid(own, sweep=sweep.name), _numbers(sweep))
    note = "First seed. A curve ends where requests never got so far; dashed grey: the limit."
    latencies = {prefix + name: spec for name, spec in here.figures.items() if name.startswith("latency/")}
    everybody = legend(system_looks(summary), {cell["system"]: cell["title"] for cell in summary["cells"]})
    yield section("Latencies", _where(), tag("p", note), everybody, grid(latencies))
    yield section("Placement", _where(), here.placements)
    for system in here.placed_systems:
        yield _of_system(summary, system, "GPUs", f"{prefix}gpus/{system}")
    for title, rows in here.tables.items():
        yield section(title, _where(), rows)
    for system in here.memory_systems:
        yield _of_system(summary, system, "KV memory over time (GiB)", f"{prefix}memory/{system}")
    yield section(
        "Misses and slowest requests",
        _where(),
        tag("p", "Some of every cause, the latest for their TTFT limit first; open one for its story."),
        here.stories,
    )
    yield from _closing(folder, summary, resolved)


def _of_system(summary: Mapping[str, Any], system: str, title: str, figure: str) -> Html:
    """The section of a figure that each place has for itself."""
    name = next(cell["title"] for cell in summary["cells"] if cell["system"] == system)
    box = tag("div", class_="figure tall", data_figure=figure, data_by_place=True)
    return section(f"{title}: {name}", _where(), box, data_system=system)


def _numbers(sweep: Sweep) -> Html:
    """The table of a sweep, folded away where it is long."""
    return tag("details", tag("summary", "All numbers"), overview(sweep.cells), open=len(sweep.cells) <= _FEW_CELLS)


def _closing(folder: Path, summary: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[Html]:
    if summary["claims"]:
        yield section("Claims", sections.claims(summary))
    yield section("Models and limits", sections.models(summary, resolved))
    if summary["assumptions"]:
        yield section("Assumptions", sections.assumptions(summary))
    yield section("Where step times come from", sections.step_times(summary))
    if flags := sections.careful(summary):
        yield section("Handle with care", flags)
    yield section("Run it again", sections.again(folder))


def _where() -> Html:
    """A line that the page fills with the place that is chosen."""
    return tag("p", class_="where")


def section(title: str, *inner: Html, **attributes: object) -> Html:
    return tag("section", tag("h2", title), *inner, **attributes)


def grid(figures: Mapping[str, Spec], sweep: str | None = None) -> Html:
    """Figures side by side as far as the screen is wide, each under its title. A legend above tells whose the series are."""
    boxes = []
    for name, spec in figures.items():
        box = tag("div", class_="figure", data_figure=name, data_sweep=sweep, data_bare=True)
        boxes.append(tag("div", tag("h3", spec["layout"]["title"]["text"]), box))
    return tag("div", *boxes, class_="grid")


def sweeps(summary: Mapping[str, Any]) -> list[Sweep]:
    """The sweeps in the order of the file; as one where they have each system once, all at one place."""
    cells = summary["cells"]
    if side_by_side(cells):
        return [sweep_of("systems", [{**cell, "axes": dict(place_of(cell))} for cell in cells])]
    names = dict.fromkeys(cell["sweep"] for cell in cells)
    return [sweep_of(name, [cell for cell in cells if cell["sweep"] == name]) for name in names]


def system_looks(summary: Mapping[str, Any]) -> Looks:
    """The colours, dashes and symbols of the systems of a folder."""
    return Looks(cell["system"] for cell in summary["cells"])


def sweep_figures(folder: Path, summary: Mapping[str, Any]) -> dict[str, Spec]:
    """Each sweep's figures as ``sweep/metric``, with the metrics that the experiment's own figures name."""
    own = read_yaml(folder / "resolved.yaml").data.get("figures") or []
    looks, found = system_looks(summary), {}
    for sweep in sweeps(summary):
        panels = [panel for entry in own if entry.get("sweep") == sweep.name for panel in entry["panels"]]
        for metric, spec in sweep_charts(sweep, looks, panels).items():
            found[f"{sweep.name}/{metric}"] = spec
    return found
