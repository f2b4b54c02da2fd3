"""The cost of an answer against GPUs that no models share: a GPU, or a group of them, for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fineserve_sim.experiment.results.answer import chosen_cell, place_of

OWN = "dedicated"
"""The system that gives each model GPUs of its own."""


class Bill(NamedTuple):
    """A system on a number of GPUs: its title, dollars an hour (None: no price is known), the least share within limits."""

    title: str
    gpus: int
    usd_per_hour: float | None
    kept: float | None = None


def against(taken: Bill, own: Bill) -> str:
    """``One GPU (group) a model: 13 GPUs, $45.37 an hour. FineServe on 8, $27.92, costs 38 % less.``"""
    kept = "" if own.kept is None else f", which keeps {100 * own.kept:.1f} % within limits"
    if taken.usd_per_hour is None or own.usd_per_hour is None:
        more = _than(taken.gpus, own.gpus, "as many", ("fewer", "more"))
        return f"One GPU (group) a model: {_gpus(own.gpus)}{kept}. {taken.title} on {taken.gpus} takes {more}."
    more = _than(taken.usd_per_hour, own.usd_per_hour, "the same", ("less", "more"))
    first = f"One GPU (group) a model: {_gpus(own.gpus)}, ${own.usd_per_hour:,.2f} an hour{kept}."
    return f"{first} {taken.title} on {taken.gpus}, ${taken.usd_per_hour:,.2f}, costs {more}."


def _than(value: float, other: float, same: str, words: tuple[str, str]) -> str:
    part = round(100 * (1 - value / other))
    return same if part == 0 else f"{abs(part)} % {words[part < 0]}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def answer_against(summary: Mapping[str, Any]) -> str | None:
    """The line of an answer; None where no cell has dedicated GPUs, or where these are the answer."""
    cell, answer = chosen_cell(summary), summary.get("answer")
    if cell is None or answer is None:
        return None
    here = [each for each in summary["cells"] if each["system"] == OWN and each["gpus"]]
    own = next((each for each in here if place_of(each) == place_of(cell)), None)
    found = answer.get("search", {}).get("gpus", {})
    taken = Bill(answer["choice"]["title"], answer["choice"]["gpus"], cell["cost"]["usd_per_hour"])
    if found.get("value") is not None:
        taken = Bill(found["title"], found["value"], found["usd_per_hour"])
    if own is None or taken.title == own["title"]:
        return None
    within = own["metrics"]["slo_attainment"]["mean"]
    return against(taken, Bill(own["title"], own["cluster"]["count"], own["cost"]["usd_per_hour"], within))


def search_against(found: Mapping[str, Any]) -> str | None:
    """The line of a search over GPUs, as size.json has it; None where one of the two has no answer."""
    if found["cheapest"] is None:
        return None
    taken = found["systems"][found["cheapest"]]
    others: Sequence[Mapping[str, Any]] = [
        each for each in found["systems"] if each["system"] == OWN and each["answer"] and each["gpu"] == taken["gpu"]
    ]
    if not others or taken["system"] == OWN:
        return None
    own = min(others, key=lambda each: each["answer"]["value"])
    return against(_bill(taken), _bill(own))


def _bill(answer: Mapping[str, Any]) -> Bill:
    return Bill(answer["title"], int(answer["answer"]["value"]), answer["answer"]["usd_per_hour"])
