"""The sections of the page that are text and tables: setting, answer, claims, assumptions, step times, how to run it again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.results.answer import chosen_cell, place_of
from fineserve_sim.experiment.results.step_times import sentence
from fineserve_sim.experiment.show.answer import answer_lines, unplaced_lines
from fineserve_sim.experiment.show.labels import counted, interval, number
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag
from fineserve_sim.experiment.show.page.records import plain_text
from fineserve_sim.experiment.show.report import flag_lines

Summary = Mapping[str, Any]


def setting(summary: Summary, resolved: Mapping[str, Any]) -> Html:
    """What was simulated, in one paragraph."""
    workload, cells = summary["workload"], summary["cells"]
    seeds = max(cell["seeds"] for cell in cells)
    requests = workload["requests"]
    drawn = f"{number(requests)} requests a run" if requests else "all requests of the trace"
    return tag(
        "p",
        f"{_gpus(resolved['cluster'])}, {counted(len(resolved['models']), 'model')}, "
        f"{counted(len({cell['system'] for cell in cells}), 'system')}, {counted(len(cells), 'cell')} of "
        f"{counted(seeds, 'seed')}{' each' if len(cells) > 1 else ''}, {drawn} from {workload['source']}. "
        "± is half of a 95 % interval. Simulated, not measured.",
    )


def _gpus(cluster: Mapping[str, Any]) -> str:
    """``8 × h100-sxm, 4 × l40s``."""
    return ", ".join(
        f"{entry['count']} × {entry['gpu'] if isinstance(entry['gpu'], str) else entry['gpu'].get('name', 'a GPU of the file')}"
        for entry in cluster.get("nodes", [cluster])
    )


def answer(summary: Summary) -> Html | None:
    """The answer in sentences, and the models that have no GPU; None where there was nothing to choose."""
    cell = chosen_cell(summary)
    if cell is None:
        return None
    here = [each for each in summary["cells"] if place_of(each) == place_of(cell)]
    lines = [tag("p", *_unbroken(line)) for line in answer_lines(summary)]
    lost = [tag("p", tag("strong", line, class_="bad")) for line in unplaced_lines(here)]
    return tag("div", *lines, *lost, class_="answer")


def _unbroken(line: str) -> Iterator[Html]:
    """A line whose options, such as --price, are not broken at their hyphens."""
    for part in re.split(r"(--[a-z-]+)", line):
        yield tag("span", part, class_="option") if part.startswith("--") else joined([part])


def models(summary: Summary, resolved: Mapping[str, Any]) -> Html:
    """What each model is and the limits of its requests, in seconds."""
    rows = []
    for model in resolved["models"]:
        name = model["model"] if isinstance(model["model"], str) else model["model"]["config"]
        limits = [_limits(summary["cells"], kind, model["id"]) for kind in ("ttft_slo_s", "tpot_slo_s")]
        rows.append(Row([model["id"], name, model["precision"], str(model["tp"]), *limits]))
    headers = ["Model", "Is", "Precision", "GPUs", "TTFT limit (s)", "TPOT limit (s)"]
    return table(headers, rows, numeric=(3, 4, 5))


def _limits(cells: Sequence[Mapping[str, Any]], kind: str, model: str) -> str:
    """The limit, or the least and the most where it differs from cell to cell."""
    found = sorted({cell[kind][model] for cell in cells if model in cell.get(kind, {})})
    if not found:
        return "none"
    return number(found[0]) if len(found) == 1 else f"{number(found[0])} to {number(found[-1])}"


def claims(summary: Summary) -> Html:
    """Each claim with the paper's value and ours."""
    rows = [
        Row(
            [
                tag("b", claim["id"]),
                claim["measure"],
                _claimed(claim["paper"]),
                interval(claim["ours"], claim["half_width"])
                if isinstance(claim["ours"], float)
                else _claimed(claim["ours"]),
                tag("span", claim["verdict"], class_=f"verdict {claim['verdict'].replace(' ', '-')}"),
                claim["note"],
            ]
        )
        for claim in summary["claims"]
    ]
    return table(["Claim", "Measure", "Paper", "Ours", "Verdict", "Note"], rows, numeric=(2, 3))


def _claimed(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else number(value)


def assumptions(summary: Summary) -> Html:
    """What the file had to assume."""
    rows = [Row([entry["what"], plain_text(entry.get("value")), entry["why"]]) for entry in summary["assumptions"]]
    return table(["Assumed", "Value", "Why"], rows)


def step_times(summary: Summary) -> Html:
    """What part of the engines' time comes from measured tables, as a bar and in words."""
    shares = summary["step_times"].get("shares", {})
    known = {kind: share for kind, share in shares.items() if share > 0}
    bar = tag(
        "div", *(tag("i", style=f"flex-grow:{share:.4f}", class_=kind) for kind, share in known.items()), class_="bar"
    )
    key = tag(
        "p",
        *(tag("span", tag("i", class_=kind), f" {kind} {share:.0%} ") for kind, share in known.items()),
        class_="key",
    )
    return (
        joined([bar, key, tag("p", sentence(summary["step_times"]) + ".")])
        if known
        else tag("p", "No step was sampled.")
    )


def careful(summary: Summary) -> Html | None:
    """Warnings and the flags of cells; None where there are none."""
    lines = [*summary["warnings"], *flag_lines(summary["cells"])]
    return tag("ul", *(tag("li", line) for line in lines)) if lines else None


def again(folder: Path) -> Html:
    """The command, the file as it was run, and what it ran on."""
    resolved = (folder / "resolved.yaml").read_text(encoding="utf-8")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    return joined(_again(resolved, environment))


def _again(resolved: str, environment: Mapping[str, Any]) -> Iterator[Html]:
    yield tag("p", "Save the file below as experiment.yaml; the same versions give the same numbers.")
    yield tag("pre", "fineserve-sim run experiment.yaml --out results/again")
    yield tag("details", tag("summary", "experiment.yaml, with every default written out"), tag("pre", resolved))
    versions = {key: value for key, value in environment.items() if key != "packages"} | environment["packages"]
    rows = [Row([name, str(value)]) for name, value in versions.items()]
    yield tag("details", tag("summary", "Versions"), table(["What", "Version"], rows))
