"""The page of a plan: its verdict, its cost, each model's place with the reason, and the effect of another load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fineserve_sim.experiment.show.answer import dollars, percent
from fineserve_sim.experiment.show.page.build import no_filters, section, write_document
from fineserve_sim.experiment.show.page.first import BAD, GOOD, HALF
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag
from fineserve_sim.experiment.show.page.legend import legend
from fineserve_sim.experiment.show.page.style import Looks, Spec, axis, frame, percent_range, rounded
from fineserve_sim.planning.gpus import named, price_of
from fineserve_sim.planning.make import Found
from fineserve_sim.planning.outlook import SITUATIONS, Beside, Outlook, Reason, outlook
from fineserve_sim.planning.problem import Group, residents
from fineserve_sim.planning.wish import problem_of, unseen
from fineserve_sim.systems import load_systems

PAGE = "plan.html"
_ROW_PX = 34
_WORDS = {GOOD: "Holds", HALF: "May not last", BAD: "Does not hold"}
_FIGURE = "beside"


@dataclass(frozen=True, slots=True)
class Shown:
    """The content of a page. ``usable_bytes``: by GPU. ``one_a_model``: the GPUs that would take, and what they cost an
    hour."""

    found: Found
    outlook: Outlook
    plan_file: str
    usable_bytes: tuple[int, ...]
    one_a_model: str

    @property
    def cluster(self) -> str:
        """The GPUs of the plan, with the model's error where there is one, and what they cost an hour."""
        found = self.found
        return f"{found.wish.cluster}{found.sure.beside_gpus}{_usd(found.usd_per_hour)}"


def _usd(usd: float | None) -> str:
    return "" if usd is None else f", ${dollars(usd)} an hour"


def shown(found: Found, plan_file: Path, prices: Mapping[str, float]) -> Shown:
    """Simulate what the page tells beside the answer."""
    problem = problem_of(found.wish)
    seen = outlook(problem, unseen(found.wish), found.best.layout)
    largest = max(zip(problem.kinds, found.wish.kinds, strict=True), key=lambda kinds: kinds[0].memory_bytes)[1][0]
    gpus = seen.beside[-1].gpus
    one_a_model = f"{named(gpus, largest)}{_usd(price_of(gpus, largest, prices))}"
    return Shown(found, seen, str(plan_file), tuple(slot.memory_bytes for slot in problem.slots), one_a_model)


def write_page(shown: Shown, path: Path) -> Path:
    """Write the page; the same plan gives the same bytes. Raises OSError from the disk."""
    title = f"A plan for {shown.found.wish.trace.name}"
    parts = [tag("h1", title), _first(shown), no_filters(), *_sections(shown)]
    return write_document(path, title, tag("main", *parts, class_="run"), {_FIGURE: _chart(shown.outlook.beside)})


def verdict_of(found: Found) -> str:
    """``good`` where unseen requests keep the target, or where none was given and the plan generalises."""
    if not found.holds:
        return BAD
    return HALF if found.warnings else GOOD


def _first(shown: Shown) -> Html:
    colour = verdict_of(shown.found)
    words = "Best found" if shown.found.target is None and colour == GOOD else _WORDS[colour]
    told = tag("p", tag("b", words, class_=f"badge is-{colour}"), " ", _headline(shown), class_="verdict-line")
    lines = [tag("p", line) for line in _sentences(shown)]
    return tag("section", tag("div", told, *lines), _map(shown), class_=f"first is-{colour}")


def _headline(shown: Shown) -> str:
    row = shown.found.judged[0]
    return (
        f"{shown.cluster}: {percent(row.plan)} of the requests that the search never saw are on time, "
        f"{percent(row.best_system)} as {_title(shown.found.best_system)} places the models."
    )


def _sentences(shown: Shown) -> Iterator[str]:
    """The cost beside one GPU a model, what a busier day and a lost GPU do, and what to be careful about."""
    plan, *_, alone = shown.outlook.beside
    yield f"One GPU a model would take {shown.one_a_model}, with {percent(alone.on_time[0])} on time."
    _, doubled, lost = map(percent, plan.on_time)
    yield f"At twice the load {doubled} are on time; without the GPU that costs most, {lost}."
    worst = shown.found.judged[0]
    yield f"On time in all: {shown.found.sure}. The worst model is {worst.worst_model}, with {percent(worst.worst)}."
    yield shown.found.sure.why
    yield from shown.found.warnings


def _map(shown: Shown) -> Html:
    """One box a GPU: its models and the memory that they take."""
    homes, here = shown.found.homes, residents(shown.found.best.layout)
    boxes = [_box(shown, gpu, sorted(set(here.get(gpu, ())))) for gpu in range(shown.found.wish.count)]
    key = [tag("span", tag("i", class_=name), f" {text} ") for name, text in (("weights", "engines"), ("kv", "KV"))]
    unplaced = [each.id for each, home in homes if not home.groups]
    missing = [tag("p", f"No GPU has room for {', '.join(unplaced)}.", class_="bad")] if unplaced else []
    return tag("div", tag("div", *boxes, class_="map"), *missing, tag("p", "Memory: ", *key, class_="key"))


def _box(shown: Shown, gpu: int, models: Sequence[int]) -> Html:
    homes, reasons = shown.found.homes, shown.outlook.reasons
    engines = sum(reasons[model].engine_bytes * _engines_on(homes[model][1].groups, gpu) for model in models)
    usable_bytes = shown.usable_bytes[gpu]
    share = min(1.0, engines / usable_bytes)
    bar = [
        tag("i", class_=name, style=f"width:{100 * part:.1f}%", title=f"{part * usable_bytes / 2**30:.1f} GiB")
        for name, part in (("weights", share), ("kv", 1 - share))
    ]
    names = [f"{homes[model][0].id} ({_way(shown, model)})" for model in models]
    return tag(
        "div",
        tag("b", _gpu(shown, gpu)),
        tag("div", joined(bar), class_="fill"),
        tag("span", ", ".join(names) or "no model"),
        class_="gpu",
    )


def _gpu(shown: Shown, gpu: int) -> str:
    """The number of a GPU, with its kind where there are several."""
    kinds = [str(kind) for kind, count in shown.found.wish.kinds for _ in range(count)]
    return f"GPU {gpu}, {kinds[gpu]}" if len(shown.found.wish.kinds) > 1 else f"GPU {gpu}"


def _engines_on(groups: Sequence[Group], gpu: int) -> int:
    return sum(gpu in group for group in groups)


def _way(shown: Shown, model: int) -> str:
    """The precision and degree in which a model runs."""
    wished, home = shown.found.homes[model]
    precision, tp = wished.options[home.option]
    return f"{precision}, TP {tp}" if tp > 1 else precision


def _sections(shown: Shown) -> Iterator[Html]:
    looks = Looks(SITUATIONS)
    yield section(
        "Beside other placements",
        tag("p", "All run under the plan's scheduler, on requests that the search never saw."),
        legend(looks, {name: name for name in SITUATIONS}, filtered=False),
        tag("div", class_="figure tall", data_figure=_FIGURE, data_bare=True),
        table(["placement", "GPUs", *SITUATIONS], map(_beside_row, shown.outlook.beside), numeric=range(1, 5)),
    )
    yield section("Why each model is where it is", *_reasons(shown))
    yield section(
        "How it was judged",
        table(
            [
                "requests on time",
                "plan",
                "worst model",
                f"{_title(shown.found.best_system)}'s placement",
                "± (difference)",
            ],
            (
                Row(
                    [
                        row.situation,
                        percent(row.plan),
                        f"{row.worst_model} {percent(row.worst)}",
                        *map(percent, (row.best_system, row.half_width)),
                    ]
                )
                for row in shown.found.judged
            ),
            numeric=range(1, 5),
        ),
        tag("p", f"Of the requests by which it was chosen, the plan keeps {percent(shown.found.promised)} on time."),
    )
    yield section("Run it", tag("pre", f"fineserve-sim run {shown.plan_file}\nfineserve-sim deploy {shown.plan_file}"))


def _beside_row(row: Beside) -> Row:
    return Row([_title(row.name), str(row.gpus), *map(percent, row.on_time)])


def _title(name: str) -> str:
    """A system by its title; what is no system as it is."""
    system = load_systems().get(name)
    return name if system is None else system.title


def _reasons(shown: Shown) -> Iterator[Html]:
    rows = []
    for (wished, home), reason in zip(shown.found.homes, shown.outlook.reasons, strict=True):
        where = " and ".join("+".join(map(str, group)) for group in home.groups) or "none"
        numbers = (f"{reason.engine_bytes / 2**30:.1f}", f"{100 * reason.prompts_busy:.0f} %", percent(reason.on_time))
        rows.append(Row([wished.id, where, *numbers, why(reason, sum(map(len, home.groups)))], {"reason": wished.id}))
    headers = ["model", "GPU", "GiB beside KV", "prompts' time", "on time", "why here"]
    yield table(headers, rows, numeric=range(2, 5))
    yield tag("p", "Prompts' time: the part of an instance's time that its prompts alone take.")
    yield tag("p", "Other places were simulated on the requests by which the plan was chosen.")


def why(reason: Reason, gpus: int) -> str:
    """Why a model is where it is, in one or two sentences. ``gpus``: how many it stands on."""
    if not gpus:
        return "No GPU has room for it."
    return f"{_company(reason)} {_other_place(reason)}".strip()


def _company(reason: Reason) -> str:
    if not reason.neighbours:
        return (
            "It has its GPUs to itself."
            if reason.on_time >= 1
            else "It has its GPUs to itself: what is late is its own doing."
        )
    cost = 100 * (reason.alone - reason.on_time)
    beside = f"Beside {', '.join(reason.neighbours)}"
    if cost < 0.05:
        return f"{beside}, which cost it nothing."
    return f"{beside}, which cost it {cost:.1f} points: alone it would keep {percent(reason.alone)}."


def _other_place(reason: Reason) -> str:
    if not reason.asked:
        return ""
    if reason.elsewhere is None:
        return "No other place has room."
    gpus = "+".join(map(str, reason.elsewhere.gpus))
    more = reason.elsewhere.more_late
    if more > 0:
        return f"On GPU {gpus}, {more} more request{'s' if more > 1 else ''} would be late."
    return (
        f"GPU {gpus} would do as well."
        if not more
        else f"GPU {gpus} alone would spare {-more}, but the search did not get there."
    )


def _chart(beside: Sequence[Beside]) -> Spec:
    """A row a placement, a sign a situation."""
    looks = Looks(SITUATIONS)
    names = [_title(row.name) for row in beside]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [rounded(100 * row.on_time[place], 4) for row in beside],
            "y": names,
            "name": situation,
            "hovertemplate": "%{x} %",
            "marker": looks.line(situation)["marker"],
            "meta": {},
        }
        for place, situation in enumerate(SITUATIONS)
    ]
    least, most = percent_range([100 * share for row in beside for share in row.on_time])
    shape = frame("Requests on time") | {
        "height": 110 + _ROW_PX * len(beside),
        "showlegend": False,
        "margin": {"l": 110, "r": 12, "t": 36, "b": 48},
        "xaxis": axis(title="Requests on time (%)", range=[least, most]),
        "yaxis": axis(autorange="reversed", type="category"),
    }
    return {"data": data, "layout": shape}
