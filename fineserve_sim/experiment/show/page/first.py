"""The first screen of the page, for the one that pays: the verdict, its cost, the models of each GPU, and what breaks first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fineserve_sim.experiment.results.answer import chosen_cell
from fineserve_sim.experiment.results.binding import QUEUE
from fineserve_sim.experiment.show.against import answer_against, search_against
from fineserve_sim.experiment.show.answer import answer_lines, beyond_lines, breaks_text
from fineserve_sim.experiment.show.out_of_reach import out_of_reach_lines
from fineserve_sim.experiment.show.page.html import Html, joined, tag
from fineserve_sim.experiment.show.sizes import headline
from fineserve_sim.experiment.show.where import MEMORY_PARTS, memory_gib, most_waiting

Summary = Mapping[str, Any]
Search = Mapping[str, Any]

GOOD, HALF, BAD = "good", "half", "bad"
_WORDS = {GOOD: "Holds", HALF: "Holds, within its interval", BAD: "Does not hold"}
_MOST_WHYS = 4
_PARTS = ("weights", "other", "kv", "left")
"""Classes of what fills a GPU, in the order of ``MEMORY_PARTS``."""


def first_screen(summary: Summary | None, searched: Search | None) -> Html | None:
    """The verdict with its colour, the cost in a sentence, the map of the GPUs, and what breaks first; None where there was
    nothing to choose."""
    cell = None if summary is None else chosen_cell(summary)
    lines = answer_lines(summary) if summary is not None else []
    if searched is None and not lines:
        return None
    colour = verdict_of(summary, searched)
    told = lines[0] if searched is None else headline(searched)
    parts = [tag("p", tag("b", _WORDS[colour], class_=f"badge is-{colour}"), " ", told, class_="verdict-line")]
    parts += [tag("p", line) for line in _sentences(summary, searched)]
    columns = [tag("div", *parts)]
    if cell is not None and cell["gpus"]:
        columns.append(gpu_map(cell, summary["answer"]["choice"]["title"] if summary else ""))
    return tag("section", *columns, class_=f"first is-{colour}")


def verdict_of(summary: Summary | None, searched: Search | None) -> str:
    """``good`` where the targets are kept beyond the interval, ``half`` within it, ``bad`` where nothing keeps them."""
    if searched is not None and not any(answer["answer"] for answer in searched["systems"]):
        return BAD
    answer = None if summary is None else summary.get("answer")
    if answer is None:
        return GOOD
    margins, holds = answer["choice"]["margins"], answer["choice"]["holds"]
    found = answer.get("search", {}).get("gpus", {})
    if not holds and found.get("value") is not None:
        margins, holds = found["margins"], True
    if not holds:
        return BAD
    return GOOD if all(margin["sure"] for margin in margins.values()) else HALF


def _sentences(summary: Summary | None, searched: Search | None) -> Iterator[str]:
    """Why nothing holds and what would, the cost against dedicated GPUs, and what breaks first at which load."""
    yield from [*_why_none(summary, searched)][:_MOST_WHYS]
    cost = search_against(searched) if searched is not None else answer_against(summary or {"cells": []})
    if cost is not None:
        yield cost
    elif summary is not None and (line := next((line for line in answer_lines(summary) if line[:4] == "Cost"), None)):
        yield line
    if summary is not None and (breaks := breaks_text(summary)):
        yield breaks


def _why_none(summary: Summary | None, searched: Search | None) -> Iterator[str]:
    if searched is not None:
        bounds = [each["out_of_reach"]["models"] for each in searched["systems"] if each["out_of_reach"]]
        yield from dict.fromkeys(line for models in bounds for line in out_of_reach_lines(models))
    elif summary is not None and (cell := chosen_cell(summary)) is not None:
        yield from beyond_lines(summary["answer"], cell)


def gpu_map(cell: Mapping[str, Any], title: str) -> Html:
    """A box a GPU: its models, what fills its memory, and how busy it is. Those where requests wait are marked."""
    shown = most_waiting(cell["gpus"])
    boxes = [_gpu(gpu) for gpu in shown]
    rest = len(cell["gpus"]) - len(shown)
    more = [tag("p", f"and {rest} more, where fewer requests wait", class_="key")] if rest else []
    key = [tag("span", tag("i", class_=part), f" {name} ") for part, name in zip(_PARTS, MEMORY_PARTS, strict=True)]
    caption = tag("p", f"{title}: GPUs and their memory. ", *key, class_="key")
    return tag("div", tag("div", *boxes, class_="map"), *more, caption)


def _gpu(gpu: Mapping[str, Any]) -> Html:
    parts = memory_gib(gpu)
    total = sum(parts) or 1.0
    bar = [
        tag("i", class_=name, style=f"width:{100 * gib / total:.1f}%", title=f"{label}: {gib:.1f} GiB")
        for name, label, gib in zip(_PARTS, MEMORY_PARTS, parts, strict=True)
    ]
    waits = f", requests wait {100 * gpu['waiting']:.0f} %" if gpu["waiting"] >= QUEUE else ""
    return tag(
        "div",
        tag("b", f"GPU {gpu['gpu']}"),
        tag("span", f"busy {100 * gpu['busy']:.0f} %{waits}", class_="key"),
        tag("div", joined(bar), class_="fill"),
        tag("span", ", ".join(gpu["models"]) or "no model"),
        class_="gpu waits" if waits else "gpu",
    )
