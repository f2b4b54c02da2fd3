"""What a chaos campaign came to, from the figures of its segments, as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np


def report(segments: list[dict[str, Any]]) -> str:
    """Markdown: what was asked, what struck, what came of it."""
    if not segments:
        return "no segment was played"
    sums = {
        name: sum((Counter(each[name]) for each in segments), Counter()) for name in ("outcomes", "burst", "faults")
    }
    loads = [each["load"][1] for each in segments]
    rows = [("segments, requests", f"{len(segments)}, {sum(each['requests'] for each in segments)}")]
    rows += [(name, str(count)) for name, count in sorted(sums["faults"].items())]
    rows += [(f"ended: {name}", str(count)) for name, count in sums["outcomes"].most_common()]
    rows += [(f"burst: status {name}", str(count)) for name, count in sums["burst"].most_common()]
    rows += [
        ("deaths of engines", f"{sum(each['deaths'] for each in segments):.0f}"),
        ("preemptions for want of KV", f"{sum(each['preemptions'] for each in segments):.0f}"),
        ("lines that logs lost", f"{sum(each['log_lines_lost'] for each in segments):.0f}"),
        ("longest wait for a first token; longest request", _most(segments, "longest_wait_s", "longest_s")),
        ("/health, median and 99th percentile of the worst segment", _health(segments, "health_s")),
        ("the same in processor time of the server", _health(segments, "health_cpu_s")),
        ("/health beside bursts: answers; median, 99th percentile, largest", _beside_bursts(segments, 0)),
        ("the same in processor time of the server", _beside_bursts(segments, 1)),
        ("that the server's event loop, and the clients, waited for a core", _no_core(segments)),
        ("load of the machine", f"{min(loads)} to {max(loads)}"),
        ("/health other than 200", str(sum(each["health_bad"] for each in segments))),
        ("memory of the server: begin, half, end of the load, end; largest of each (MB)", _memory(segments)),
        ("what must not happen", str(sum(len(each["problems"]) for each in segments))),
    ]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    problems = [f"- segment {each['segment']}: {problem}" for each in segments for problem in each["problems"]]
    return "\n".join([*lines, "", *problems])


def _most(segments: list[dict[str, Any]], *names: str) -> str:
    return "; ".join(f"{max(each[name] for each in segments):.1f} s" for name in names)


def _health(segments: list[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{1000 * max(each[name][part] for each in segments):.0f} ms" for part in (0, 1))


def _beside_bursts(segments: list[dict[str, Any]], which: int) -> str:
    found = [answer[which] for each in segments for answer in each["burst_health_s"]]
    return f"{len(found)}; " + ", ".join(f"{1000 * each:.0f} ms" for each in np.quantile(found, [0.5, 0.99, 1]))


def _no_core(segments: list[dict[str, Any]]) -> str:
    """Of the time of the storms."""
    server_s, clients_s, storms_s = (sum(each["no_core_s"][part] for each in segments) for part in range(3))
    return f"{server_s / storms_s:.0%}, {clients_s / storms_s:.0%}"


def _memory(segments: list[dict[str, Any]]) -> str:
    """Samples of a segment: some under load, the last when all is calm again."""
    sampled = [(mb[0], mb[(len(mb) - 1) // 2], mb[-2], mb[-1]) for mb in (each["rss_mb"] for each in segments)]
    return ", ".join(f"{max(each):.0f}" for each in zip(*sampled, strict=True))
