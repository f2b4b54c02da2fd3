"""What results are called where people read them: labels and units of metrics and axes, numbers in few digits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Quantity:
    """A metric as shown: ``label`` and ``unit`` in words, ``scale`` from the stored value to the shown one."""

    label: str
    unit: str = ""
    scale: float = 1.0

    @property
    def text(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


_GIB = 1 / 2**30
_KNOWN = {
    "ttft_attainment": Quantity("TTFT SLO attainment", "%", 100),
    "tpot_attainment": Quantity("TPOT SLO attainment", "%", 100),
    "e2e_attainment": Quantity("End-to-end SLO attainment", "%", 100),
    "slo_attainment": Quantity("Within all limits", "%", 100),
    "each_ttft_attainment": Quantity("Worst model: TTFT", "%", 100),
    "each_tpot_attainment": Quantity("Worst model: TPOT", "%", 100),
    "each_e2e_attainment": Quantity("Worst model: end to end", "%", 100),
    "each_slo_attainment": Quantity("Worst model: all limits", "%", 100),
    "goodput_per_s": Quantity("Goodput", "requests/s"),
    "throughput_per_s": Quantity("Throughput", "requests/s"),
    "decode_throughput_tokens_per_s": Quantity("Decode throughput", "tokens/s"),
    "token_throughput_per_s": Quantity("Token throughput", "tokens/s"),
    "arrival_rate_per_s": Quantity("Arrivals", "requests/s"),
    "kv_use_mean": Quantity("KV cache in use, mean", "%", 100),
    "kv_use_peak": Quantity("KV cache in use, peak", "%", 100),
    "gpu_hours_per_mtoken": Quantity("GPU hours per million tokens", "GPU h"),
    "gpu_hours_per_1000_within": Quantity("GPU hours per thousand requests within their limits", "GPU h"),
    "ttft_mean_s": Quantity("TTFT mean of those served", "s"),
    "tpot_mean_s": Quantity("TPOT mean of those served", "s"),
    "e2e_mean_s": Quantity("E2E mean of those served", "s"),
    "kv_used_bytes": Quantity("KV cache in use", "GiB", _GIB),
    "gpu_stranded_bytes": Quantity("KV cache stranded", "GiB", _GIB),
    "gpu_free_bytes": Quantity("KV cache free", "GiB", _GIB),
    "kv_used_peak_bytes": Quantity("KV cache in use, peak", "GiB", _GIB),
    "waiting_mean": Quantity("Waiting requests, mean"),
    "waiting_max": Quantity("Waiting requests, most"),
    "waiting": Quantity("Waiting requests"),
    "kv_demand_mean": Quantity("KV demand of capacity without drop, mean", "%", 100),
    "kv_demand_peak": Quantity("KV demand of capacity without drop, peak", "%", 100),
    "bubble_fraction": Quantity("Idle stage time in pipelines", "%", 100),
    "wakes_from_host": Quantity("Engines woken, weights in host memory"),
    "wakes_from_disk": Quantity("Engines woken, weights on disk"),
    "starts": Quantity("Engines started"),
    "running": Quantity("Running requests"),
    "windowed_ttft_s": Quantity("Mean TTFT in 2 s", "s"),
    "output_tokens_per_s": Quantity("Output", "tokens/s"),
    "usd_per_hour": Quantity("Cost", "$/h"),
    "usd_per_mtoken": Quantity("Cost of a million output tokens", "$"),
    "usd_per_1000_within": Quantity("Cost of a thousand requests within limits", "$"),
    "busy": Quantity("Busy", "%", 100),
    "compute": Quantity("Compute needed", "%", 100),
    "bandwidth": Quantity("Bandwidth needed", "%", 100),
    "requests_wait": Quantity("Requests wait", "%", 100),
    "kv_short": Quantity("KV memory short", "%", 100),
    "slots_short": Quantity("Slots short", "%", 100),
    "rate_scale": Quantity("Rate scale"),
    "slo_scale": Quantity("SLO scale"),
    "load": Quantity("Load"),
    "cluster.count": Quantity("GPUs"),
}
_UNITS = (
    ("_tokens_per_s", "tokens/s", 1.0),
    ("_bytes_per_s", "bytes/s", 1.0),
    ("_per_s", "1/s", 1.0),
    ("_s", "s", 1.0),
    ("_bytes", "GiB", _GIB),
)
_ABBREVIATIONS = frozenset({"ttft", "tpot", "itl", "e2e", "kv", "slo", "gpu", "tp"})


LATENCY = re.compile(r"(ttft|tpot|e2e)_p[\d.]+_s")
"""A percentile of a latency, its moment as the group."""


def quantity(name: str) -> Quantity:
    """The words for a metric or axis; an unknown name is read by the rule that a name carries its unit last."""
    if name in _KNOWN:
        return _KNOWN[name]
    stem = name.rsplit(".", 1)[-1]
    for suffix, unit, scale in _UNITS:
        if stem.endswith(suffix):
            return Quantity(_words(stem.removesuffix(suffix)), unit, scale)
    return Quantity(_words(stem))


def _words(stem: str) -> str:
    words = [word.upper() if word in _ABBREVIATIONS else word for word in stem.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


def number(value: object) -> str:
    """A value for people: three significant digits or all digits of the integer part, a dash where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–"
    magnitude = _magnitude(value)
    if abs(magnitude) >= 6:
        return f"{value:.3g}"
    text = f"{value:,.{max(0, 2 - magnitude)}f}" if isinstance(value, float) else f"{value:,}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def counted(number: int, noun: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def interval(mean: float | None, half_width: float | None) -> str:
    """A mean to three significant digits and its half-width to the same decimals, a dash where there is no mean."""
    if mean is None or half_width is None or max(abs(_magnitude(mean)), abs(_magnitude(half_width))) >= 6:
        return number(mean) if half_width is None else f"{number(mean)} ± {number(half_width)}"
    decimals = max(0, 2 - _magnitude(mean or half_width))
    return f"{mean:,.{decimals}f} ± {half_width:,.{decimals}f}"


_ONE_OF = re.compile(r"(\w+)s\.(\d+)\.\w+")
"""A key of one entry of a list: ``faults.0.time_s``."""


def _axis(axis: str) -> Quantity:
    """The words for an axis, whose values are shown as they are given."""
    found = quantity(axis)
    words, unit = (found.label, found.unit) if found.scale == 1.0 else (_words(axis.rsplit(".", 1)[-1]), "")
    entry = _ONE_OF.fullmatch(axis)
    label = words if entry is None else f"{entry[1].capitalize()} {entry[2]} {words[:1].lower()}{words[1:]}"
    return Quantity(label, unit)


def axis_label(axis: str) -> str:
    """The name of an axis with its unit: ``Fault 0 time (s)``."""
    return _axis(axis).text


def axis_text(axis: str, value: object) -> str:
    """One value of an axis with its name, such as ``SLO scale 20`` or ``TTFT 0.5 s``, to the digits that tell points apart."""
    found = _axis(axis)
    unit = found.unit.removeprefix("1") if found.unit == "1/s" else f" {found.unit}" * bool(found.unit)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{found.label} {number(value)}"
    return f"{found.label} {value:,.6g}{unit}"


def distinct(values: Iterable[object]) -> list[object]:
    """The values without repeats: numbers in ascending order, anything else in order of appearance."""
    unique = list(dict.fromkeys(values))
    numeric = [value for value in unique if isinstance(value, int | float)]
    return [*sorted(numeric)] if len(numeric) == len(unique) else unique


def gpu_text(gpu: Mapping[str, Any]) -> str:
    """The number of a GPU as ``gpus`` of a cell have it, with its kind where there are several: ``3``, or ``3 l40s``."""
    return f"{gpu['gpu']} {gpu['kind']}" if "kind" in gpu else str(gpu["gpu"])


def varying_axes(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The axes on which cells of summary.json differ, in the order in which the first cell names them."""
    return [axis for axis in cells[0]["axes"] if len({cell["axes"].get(axis) for cell in cells}) > 1]
