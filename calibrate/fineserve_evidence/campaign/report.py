"""The report of a campaign: what is complete, what to commit, and each table beside the simulator's predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_calibrate.probes.engines import Composition
from fineserve_calibrate.probes.nvidia import catalog_name
from fineserve_calibrate.probes.report import RESTLESS
from fineserve_calibrate.probes.schema import ProbeError
from fineserve_calibrate.tables import Table

from fineserve_evidence.campaign.predictions import (
    DEPLOYMENT,
    Predictor,
    Row,
    Slowdown,
    caps,
    parity,
    predictor_of,
    slowdowns,
)
from fineserve_evidence.campaign.record import Entry, campaign_tables, opened, write
from fineserve_sim.catalog import deployment, driver_costs, gpu

DRIVER = {"create": "create_s", "map": "map_s", "set_access": "map_s", "unmap": "unmap_s", "release": "unmap_s"}
"""The catalog's cost that each call is part of: mapping is both map and set_access, unmapping both unmap and release."""
PAGE_BYTES = 2**21
LAYER_BYTES = 2**28
"""Handles of more bytes in all than this belong to a layer."""


def conclude(path: Path) -> list[Path]:
    """Write tables and ``report.md`` of a campaign's folder or archive. Return the files.

    Raises ProbeError for another path.
    """
    identity, entries, manifest, folder = opened(path)
    written = write(folder, identity, entries)
    rows = {
        name: [row for entry in entries if entry["table"] == name for row in entry["rows"]] for name in _names(entries)
    }
    name = catalog_name(identity.device)
    predictor = predictor_of(gpu(name) if name else None, rows.get("sharing", []) + rows.get("step", []))
    lines = [f"# Campaign on {identity.device}", "", *_machine(manifest, entries), *_parts(manifest)]
    lines += _commit(campaign_tables(identity, entries), entries)
    for section, about in _SECTIONS.items():
        if rows.get(section):
            lines += about(rows[section], predictor)
    lines += _parity(folder, rows.get("step", []))
    report = folder / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*written, report]


def _names(entries: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(entry["table"] for entry in entries))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Write a table in Markdown, with an empty line after it."""
    return [
        f"| {' | '.join(head)} |",
        "| " + " | ".join("---" for _ in head) + " |",
        *[f"| {' | '.join(map(str, row))} |" for row in rows],
        "",
    ]


def _machine(manifest: Mapping[str, Any], entries: Sequence[Entry]) -> list[str]:
    """The fingerprint, in a few lines."""
    identity, machine = manifest.get("identity", {}), manifest.get("machine", {})
    clocks = dict.fromkeys(", ".join(entry["clocks"].split(", ")[:2]) for entry in entries)
    seconds = sum(entry["seconds"] + entry["setup_s"] for entry in entries)
    facts = {**machine.get("gpu", {}), **machine.get("host", {}), **machine.get("packages", {})}
    return [
        "; ".join(f"{name} {value}" for name, value in identity.items()) + ".",
        "",
        "; ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        f"{len(entries)} measurements, {seconds / 60:.1f} minutes. Clocks seen: {'; '.join(list(clocks)[:8])}.",
        "",
    ]


def _parts(manifest: Mapping[str, Any]) -> list[str]:
    parts = manifest.get("parts", {})
    rows = [
        (name, part["measured"], part["failed"], part["left"], "; ".join(part["reasons"]))
        for name, part in parts.items()
    ]
    whole = "All of it was measured." if manifest.get("complete") else "Not all of it was measured."
    return ["## What is complete", "", whole, "", *table(("part", "measured", "failed", "left", "why"), rows)]


def _commit(tables: Sequence[Table], entries: Sequence[Entry]) -> list[str]:
    """What to do with each table."""
    rows = []
    for each in tables:
        failed = sum(entry["table"] == each.operator and entry["reason"] is not None for entry in entries)
        restless = float(np.median(each.columns["spread"]))
        todo = "measure again: the device was not free, or its clocks moved" if restless > RESTLESS else "commit"
        todo += f", and say that {failed} points are missing" if failed else ""
        rows.append((f"{each.operator}.parquet", len(each), f"{restless:.1%}", todo))
    return ["## What to commit", "", *table(("table", "rows", "spread, median", "what to do"), rows)]


def _percent(values: Sequence[float]) -> str:
    """Median error with its sign, and median and worst of the absolute ones."""
    errors = np.array(values)
    return f"{np.median(errors):+.0%}; {np.median(np.abs(errors)):.0%}; {np.abs(errors).max():.0%}"


def _sharing(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    found = slowdowns(rows, predictor)
    groups: dict[tuple[str, ...], list[Slowdown]] = {}
    for each in found:
        name = f"{each.sharing}, capped" if each.capped else each.sharing
        groups.setdefault((name, each.mode, str(len(each.engines)), each.phases), []).append(each)
    lines = []
    for group, members in sorted(groups.items()):
        ratios = np.array([each.measured for each in members])
        errors = [each.error for each in members if each.error is not None]
        each_engine = f"{np.median(ratios) / int(group[2]):.2f}"
        values = (f"{np.median(ratios):.2f}", f"{ratios.min():.2f} to {ratios.max():.2f}", each_engine)
        lines.append((*group, len(members), *values, _percent(errors) if errors else "unknown"))
    head = ("sharing", "mode", "engines", "phase", "rows", "slowdown", "least to most", "over engines")
    result = [
        "## Several engines on the device",
        "",
        "Mean step beside others over mean step alone, under the same cap.",
    ]
    result += ["", *table((*head, "predicted: bias; error; worst"), lines), *_each(found), *_caps(rows, predictor)]
    return result


def _each(found: Sequence[Slowdown]) -> list[str]:
    rows = [
        (
            each.sharing,
            each.text,
            f"{1e3 * each.alone_s:.3g}",
            f"{1e3 * each.shared_s:.3g}",
            f"{each.measured:.2f}",
            "" if each.predicted is None else f"{each.predicted:.2f}",
        )
        for each in found
    ]
    head = ("sharing", "engines, the first one's steps", "alone, ms", "beside, ms", "slowdown", "predicted")
    return ["### Each row", "", *table(head, rows)]


def _caps(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    found = [
        (f"{seat.dtype}@{seat.percent}", _load(load), mode, f"{ratio:.2f}", "" if today is None else f"{today:.2f}")
        for (seat, load), mode, ratio, today in caps(rows, predictor)
    ]
    head = ("engine", "load", "mode", "slowdown", "predicted")
    return ["### Alone under a part of the SMs", "", *table(head, found)] if found else []


def _load(load: Composition) -> str:
    if not load.prefill_tokens:
        return f"{load.decodes} decodes at {load.context}"
    return f"prompt of {load.prefill_tokens}" + (f" beside {load.decodes} decodes" if load.decodes else "")


def _step(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    lines = []
    for dtype, mode in dict.fromkeys((str(row["dtype"]), str(row["mode"])) for row in rows):
        for phase in ("decode", "prefill", "both"):
            chosen = [row for row in rows if (row["dtype"], row["mode"]) == (dtype, mode) and _phase(row) == phase]
            if not chosen:
                continue
            times = [1e3 * float(row["latency_s"]) for row in chosen]
            errors = "unknown"
            if predictor:
                predicted = [1e3 * predictor.step_s(dtype, mode, _composition(row)) for row in chosen]
                errors = _percent([a / b - 1 for a, b in zip(predicted, times, strict=True)])
            lines.append((dtype, mode, phase, len(chosen), f"{min(times):.3g} to {max(times):.3g}", errors))
    head = ("dtype", "mode", "phase", "rows", "ms", "predicted: bias; error; worst")
    return ["## Steps of one engine", "", *table(head, lines), *_graphs(rows)]


def _phase(row: Row) -> str:
    return "decode" if not row["prefill_tokens"] else "both" if row["decodes"] else "prefill"


def _composition(row: Row) -> Composition:
    return Composition(*(int(row[name]) for name in ("decodes", "context", "prefill_tokens", "cached_tokens")))


def _graphs(rows: Sequence[Row]) -> list[str]:
    """Eager steps against those with graphs, where both were measured."""
    by_mode = {(row["mode"], row["dtype"], _composition(row)): float(row["latency_s"]) for row in rows}
    lines = [
        (dtype, _load(load), f"{1e3 * seconds:.3g}", f"{1e3 * by_mode['eager', dtype, load]:.3g}")
        for (mode, dtype, load), seconds in by_mode.items()
        if mode == "graphs" and ("eager", dtype, load) in by_mode
    ]
    return (
        ["### With and without graphs", "", *table(("dtype", "step", "graphs, ms", "eager, ms"), lines)]
        if lines
        else []
    )


def _host(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    """The host's part as a line over running sequences, against the catalog's."""
    lines = []
    for mode in dict.fromkeys(str(row["mode"]) for row in rows):
        counts, seconds = (
            np.array([float(row[name]) for row in rows if row["mode"] == mode]) for name in ("decodes", "latency_s")
        )
        each_s, step_s = np.polyfit(counts, seconds, 1) if len(set(counts)) > 1 else (0.0, float(seconds.mean()))
        today = deployment(DEPLOYMENT[mode]).overhead_s.value
        lines.append((mode, len(counts), f"{1e3 * step_s:.2f}", f"{1e6 * each_s:.1f}", f"{1e3 * today:.2f}"))
    head = ("mode", "rows", "a step, ms", "a running sequence, µs", "the catalog's step, ms")
    return ["## The host's part", "", *table(head, lines)]


def _vmm(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    costs = driver_costs()
    lines = []
    for call, load in dict.fromkeys((str(row["call"]), str(row["load"])) for row in rows):
        chosen = [row for row in rows if (row["call"], row["load"]) == (call, load)]
        pages = [1e6 * float(row["latency_s"]) for row in chosen if row["bytes"] == PAGE_BYTES]
        larger = [1e6 * float(row["latency_s"]) for row in chosen if row["bytes"] != PAGE_BYTES]
        today = 1e6 * float(getattr(costs, DRIVER[call]).value)
        shown = [f"{np.median(times):.1f}" if times else "" for times in (pages, larger)]
        lines.append((call, load, *shown, f"{today:.1f}, {DRIVER[call]}"))
    head = ("call", "device", "2 MiB, µs", "larger, µs", "the catalog's, µs")
    return ["## Calls of the driver", "", *table(head, lines), *_whole(rows)]


def _whole(rows: Sequence[Row]) -> list[str]:
    """What it takes to map and unmap all handles of a point, where there are many bytes: a layer of a model."""
    seconds: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row["bytes"] * row["count"] > LAYER_BYTES:
            key = (str(row["count"]), f"{row['bytes'] / 2**20:.0f}", row["load"])
            seconds.setdefault(key, {})[row["call"]] = 1e3 * row["count"] * row["latency_s"]
    lines = [
        (*key, f"{calls.get('map', 0.0) + calls.get('set_access', 0.0):.3g}", f"{calls.get('unmap', 0.0):.3g}")
        for key, calls in seconds.items()
    ]
    head = ("handles", "MiB each", "device", "map and set access, ms", "unmap, ms")
    return ["### A layer of a model", "", *table(head, lines)] if lines else []


def _copy(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    lines = []
    for row in rows:
        size, seconds = row["bytes"], row["latency_s"]
        values = (f"{size / 1e6:.0f}", f"{1e3 * seconds:.3g}", f"{size / seconds / 1e9:.3g}")
        lines.append((row["direction"], row["host_memory"], *values))
    return ["## Copies", "", *table(("direction", "host memory", "MB", "ms", "GB/s"), lines)]


def _layouts(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    """Each layout against vLLM's default."""
    keys = ("kv_dtype", "batch", "context")
    seconds = {(row["layout"], *(row[key] for key in keys)): float(row["latency_s"]) for row in rows}
    lines = []
    for layout in dict.fromkeys(str(row["layout"]) for row in rows):
        for kv_dtype in dict.fromkeys(str(row["kv_dtype"]) for row in rows):
            ratios = [
                taken / seconds["LBNHC", *point]
                for (which, *point), taken in seconds.items()
                if which == layout and point[0] == kv_dtype and ("LBNHC", *point) in seconds
            ]
            if ratios:
                lines.append((layout, kv_dtype, len(ratios), f"{np.median(ratios):.2f}", f"{max(ratios):.2f}"))
    return ["## KV layouts", "", *table(("layout", "KV dtype", "rows", "against LBNHC, median", "worst"), lines)]


def _trials(rows: Sequence[Row], predictor: Predictor | None) -> list[str]:
    lines = [(row["trial"], row["quantity"], f"{row['value']:.5g}" if "value" in row else row["text"]) for row in rows]
    return ["## The runtime", "", *table(("trial", "quantity", "value"), lines)]


def _parity(folder: Path, steps: Sequence[Row]) -> list[str]:
    head = ["### The replay beside the simulator, with the steps measured here", ""]
    try:
        found = parity(folder, steps)
    except ProbeError as problem:
        return [*head, f"It could not be simulated: {problem}", ""]
    lines = [(name, f"{real:.4g}", f"{simulated:.4g}", _gap(real, simulated)) for name, real, simulated in found]
    return [*head, *table(("metric", "real", "simulated", "gap"), lines)] if lines else []


def _gap(real: float, simulated: float) -> str:
    return f"{simulated / real - 1:+.0%}" if real else ""


_SECTIONS: Mapping[str, Callable[[Sequence[Row], Predictor | None], list[str]]] = {
    "sharing": _sharing,
    "step": _step,
    "host_overhead": _host,
    "vmm": _vmm,
    "copy": _copy,
    "kv_layout": _layouts,
    "trials": _trials,
}
