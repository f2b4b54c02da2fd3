"""A campaign as a command: ``fineserve-calibrate campaign``, or ``python3 -m fineserve_evidence.campaign`` alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fineserve_calibrate.probes.engines import LLAMA_8B, TINY, ProbedModel
from fineserve_calibrate.probes.nvidia import check_wanted, find_gpu
from fineserve_calibrate.probes.schema import ProbeError

from fineserve_evidence.campaign import MINUTES
from fineserve_evidence.campaign.items import Item
from fineserve_evidence.campaign.plan import plan
from fineserve_evidence.campaign.record import NAME, Journal, pack, progress
from fineserve_evidence.campaign.run import Bench, Overdue, run

OVERDUE_S = 25.0
"""Seconds that an item may take beyond the limit when it began in time."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the command line. ``only`` selects parts by texts in their names, separated by commas."""

    gpu: str
    minutes: float = MINUTES
    out: Path | None = None
    only: str | None = None
    retry: bool = False


OpenBench = Callable[[str, ProbedModel, Path], Bench]


def open_bench(gpu: str, model: ProbedModel, folder: Path) -> Bench:
    """Open the device ``gpu`` of this machine. Raises ProbeError where it or torch is missing."""
    found = None if gpu == "cpu" else find_gpu(gpu)
    from fineserve_evidence.campaign.bench import DeviceBench

    return DeviceBench(found, model, folder)


def planned(request: Request) -> tuple[ProbedModel, list[Item], list[Item]]:
    """Choose the model, list all items, and select the requested ones. Raises ProbeError for an unknown device or part."""
    check_wanted(request.gpu)
    on_cpu = request.gpu == "cpu"
    model = TINY if on_cpu else LLAMA_8B
    items = plan(on_cpu, model.name)
    wanted = [text for text in (request.only or "").split(",") if text]
    chosen = [item for item in items if not wanted or any(text in item.part for text in wanted)]
    if not chosen:
        parts = ", ".join(dict.fromkeys(item.part for item in items))
        raise ProbeError(f"--only {request.only}: no such part; parts: {parts}")
    return model, items, chosen


def campaign(request: Request, say: Callable[[str], None], bench_of: OpenBench = open_bench) -> Path:
    """Measure what fits into the minutes, pack it, and return the archive.

    Measurements are packed also when the device is lost, or the user interrupts. Raises ProbeError for an impossible request
    before anything is written, and when engines do not start any more.
    """
    model, items, chosen = planned(request)
    folder = request.out or Path("calibration") / f"{request.gpu}-campaign"
    limit_s = 60 * request.minutes
    bench, journal = bench_of(request.gpu, model, folder), None
    with _signals(limit_s + OVERDUE_S):
        try:
            begun_s = bench.device.now_s()
            journal = Journal(folder, bench.device.identity)
            say(f"{bench.device.identity.device}: {len(chosen)} items, {request.minutes:g} minutes, into {folder}")
            run(chosen, bench, journal, begun_s + limit_s, say, request.retry)
        finally:
            bench.close()
            if journal is not None and journal.entries:
                pack(folder, items, journal)
    if not journal.entries:
        raise ProbeError(f"--minutes {request.minutes:g}: nothing fits into them; give more")
    for line in summary_lines(chosen, journal):
        say(line)
    return folder / NAME


@contextmanager
def _signals(limit_s: float) -> Iterator[None]:
    """SIGTERM is as Ctrl-C: what was started is ended, what was measured is packed. An item that is still not finished after
    ``limit_s`` could not be measured."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def overdue(*_: object) -> None:
        raise Overdue("not finished when the time of the command was over")

    before = signal.signal(signal.SIGTERM, interrupted), signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])


def summary_lines(items: Sequence[Item], journal: Journal) -> list[str]:
    """Tell what each part has, and what is left in all."""
    parts = progress(items, journal.entries.values())
    lines = []
    for name, part in parts.items():
        reason = f": {part.reasons[0]}" if part.reasons else ""
        lines.append(f"{name}: {part.measured} measured, {part.failed} could not be{reason}, {part.left} left")
    left = sum(part.left for part in parts.values())
    lines.append(f"{left} items are left; the same command goes on" if left else "complete: nothing is left")
    return lines


def plan_lines(items: Sequence[Item]) -> list[str]:
    """Tell the parts in order, with their expected minutes and the sum so far."""
    lines, total_s, running = [f"{'part':44}{'items':>6}{'minutes':>9}{'so far':>8}"], 0.0, ""
    for part in dict.fromkeys(item.part for item in items):
        mine = [item for item in items if item.part == part]
        seconds = sum(item.expected_s for item in mine) + (mine[0].setup_s if mine[0].setup != running else 0.0)
        running, total_s = mine[0].setup, total_s + seconds
        lines.append(f"{part:44}{len(mine):>6}{seconds / 60:>9.1f}{total_s / 60:>8.1f}")
    return lines
