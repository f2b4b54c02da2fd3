"""The loop of a campaign: measure what still fits into the time, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fineserve_calibrate.probes.parts import Row
from fineserve_calibrate.probes.schema import Backend, ProbeError, Unavailable

from fineserve_evidence.campaign.items import Item
from fineserve_evidence.campaign.record import Entry, Journal

LOST = 3
"""Setups in a row that did not start, after which the device counts as lost."""


class SetupFailed(Unavailable):
    """The engines that an item needs do not start. When the device is lost, no others will."""


class Overdue(Unavailable):
    """The command's time was over before an item ended."""


class Bench(Protocol):
    """A device with what the items need on it."""

    @property
    def device(self) -> Backend:
        """The device itself."""

    @property
    def setup(self) -> str:
        """The setup that runs now; empty where nothing does."""

    def prepare(self, item: Item) -> None:
        """Start the item's setup in place of the one that runs.

        Raises SetupFailed, or Unavailable for a setup that this device does not have.
        """

    def measure(self, item: Item) -> list[Row]:
        """Measure the item. Raises Unavailable."""

    def close(self) -> None:
        """End everything that was started, the device's processes included."""


def run(
    items: Sequence[Item],
    bench: Bench,
    journal: Journal,
    until_s: float,
    say: Callable[[str], None] = lambda text: None,
    retry: bool = False,
) -> list[Item]:
    """Measure the items that are not in the journal yet and fit into the time. Return the items that are left.

    Starting a setup must leave time for as much measuring as the start takes, or for all items of that setup. A setup that is
    overdue is left, too, unless it was the first of this run.

    Raises ProbeError when the device is lost, or ``LOST`` setups in a row do not start.
    """
    todo = [item for item in items if not journal.done(item, retry)]
    pace = Pace(list(journal.entries.values()), {item.key: item for item in items})
    left, postponed, failed = list[Item](), set[str](), dict[str, str]()
    began, in_a_row = False, 0
    for place, item in enumerate(todo):
        if item.setup in failed:
            journal.add(item, _outcome(bench, reason=failed[item.setup]))
            continue
        if item.setup in postponed or bench.device.now_s() + _needed_s(todo[place:], bench.setup, pace) > until_s:
            left.append(item)
            postponed |= {item.setup} - {bench.setup, ""}
            continue
        try:
            outcome = _one(item, bench)
            in_a_row = 0 if outcome["setup_s"] else in_a_row
            pace.note(item, outcome)
        except Unavailable as reason:
            if isinstance(reason, Overdue) and began:
                return [*left, *todo[place:]]
            outcome = _outcome(bench, reason=str(reason))
            failed[item.setup] = str(reason)
            in_a_row += isinstance(reason, SetupFailed)
        began = True
        journal.add(item, outcome)
        say(f"{item.name}: {outcome['reason'] or result_text(outcome['rows'])} ({outcome['seconds']:.1f} s)")
        if outcome["reason"] and not bench.device.healthy():
            raise ProbeError(f"{item.name}: the device does not answer any more after {outcome['reason']}")
        if in_a_row >= LOST:
            raise ProbeError(f"{LOST} setups in a row did not start, the last with: {outcome['reason']}")
    return left


def _needed_s(todo: Sequence[Item], running: str, pace: Pace) -> float:
    """Seconds for the first item, and for what must follow so that its setup was worth starting."""
    first = todo[0]
    if first.setup == running or not first.setup:
        return pace.item_s(first)
    setup_s = pace.setup_s(first)
    alike_s = sum(pace.item_s(item) for item in todo if item.setup == first.setup)
    return setup_s + max(pace.item_s(first), min(alike_s, setup_s))


def _one(item: Item, bench: Bench) -> Row:
    """The outcome of one item; a measurement that fails has a reason. Raises Unavailable when its setup does not start."""
    begun_s = bench.device.now_s()
    if bench.setup != item.setup:
        bench.prepare(item)
    ready_s = bench.device.now_s()
    rows, reason = list[Row](), None
    try:
        rows = bench.measure(item)
    except Unavailable as why:
        reason = str(why)
    except Exception as error:  # a kernel may raise anything; it must not stop the others
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return _outcome(bench, rows, reason, bench.device.now_s() - ready_s, ready_s - begun_s if item.setup else 0.0)


def _outcome(
    bench: Bench, rows: Sequence[Row] = (), reason: str | None = None, seconds: float = 0.0, setup_s: float = 0.0
) -> Row:
    times = {"seconds": round(seconds, 3), "setup_s": round(setup_s, 3)}
    return {"rows": list(rows), "reason": reason, **times, "clocks": bench.device.clocks()}


def result_text(rows: Sequence[Row]) -> str:
    """Show the medians of rows, in milliseconds."""
    return ", ".join(f"{1e3 * row['latency_s']:.3g} ms" for row in rows if "latency_s" in row) or "done"


class Pace:
    """Seconds that items and setups will take here.

    The plan's expectation is corrected by a ratio: measured over expected seconds of all items of the part, and of all setups.
    """

    def __init__(self, entries: Sequence[Entry], expected: Mapping[str, Item]) -> None:
        self._items: dict[str, list[tuple[float, float]]] = {}
        self._setups: list[tuple[float, float]] = []
        for entry in entries:
            if entry["key"] in expected and entry["reason"] is None:
                self.note(expected[entry["key"]], entry)

    def note(self, item: Item, outcome: Mapping[str, Any]) -> None:
        """Learn from a measurement."""
        self._items.setdefault(item.part, []).append((outcome["seconds"], item.expected_s))
        if outcome["setup_s"] and item.setup_s:
            self._setups.append((outcome["setup_s"], item.setup_s))

    def item_s(self, item: Item) -> float:
        return item.expected_s * _ratio(self._items.get(item.part, ()))

    def setup_s(self, item: Item) -> float:
        return item.setup_s * _ratio(self._setups)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(took for took, _ in pairs) / sum(expected for _, expected in pairs) if pairs else 1.0
