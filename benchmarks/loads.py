"""Loads of the experiments that a rule sets: what the rule measures at the load in the file, and the load that the rule gives.

    python benchmarks/loads.py [--only TEXT] [--jobs N] [--out FOLDER]

The papers print no rates. Where a rule stands in their place (``RULES``), the load is the highest on its grid that the rule
allows. It moves whenever engines or the sharing of GPUs do: run this after such a change, write the loads into the files, and
only then run the claims. One line a rule; simulations are kept in the folder and taken up again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fineserve_sim.experiment import load_experiment, run_loaded

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
OUT = Path("results") / "loads"
KEPT = 0.99
"""Share of what arrives that an engine must complete to sustain it."""
OVERLOAD_PER_S = 60
"""Requests/s that saturate one engine of Llama-3.1-8B."""


@dataclass(frozen=True)
class Lab:
    """Where measurements are simulated."""

    out: Path
    jobs: int | None

    def cell(self, name: str, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first cell of an experiment with keys replaced."""
        keys = {"claims": [], "figures": [], **overrides}
        experiment = load_experiment(
            EXPERIMENTS / f"{name}.yaml", [(key, json.dumps(each)) for key, each in keys.items()]
        )
        summary = json.loads(run_loaded(experiment, self.out / name, jobs=self.jobs).read_text(encoding="utf-8"))
        found: Mapping[str, Any] = summary["cells"][0]
        return found


Measure = Callable[[Lab, float], float]
"""A quantity that falls while the load rises."""


@dataclass(frozen=True)
class Rule:
    """The load is the highest multiple of ``step`` at which ``measure`` is at least ``level``.

    ``places``: where it stands, keys of experiment files; ``per`` is what they count in, if they give a load for rate scale 1.
    """

    name: str
    says: str
    measure: Measure
    level: float
    step: float
    places: tuple[str, ...]
    per: float = 1.0

    @property
    def in_file(self) -> float:
        return stands_at(self.places[0]) * self.per

    def load(self, lab: Lab) -> float:
        return highest(partial(self.measure, lab), self.in_file, self.level, self.step)


def stands_at(place: str) -> float:
    """The number at ``file:key.key.0.key``."""
    name, _, keys = place.partition(":")
    found: Any = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8"))
    for key in keys.split("."):
        found = found[int(key) if isinstance(found, list) else key]
    return float(found)


def highest(quantity: Callable[[float], float], start: float, level: float, step: float) -> float:
    """The highest multiple of ``step`` at which ``quantity``, positive and falling, is at least ``level``.

    A bracket around ``start`` grows by a fifth at a time; inside it the next value lies on the straight line between its ends
    in logarithms.
    """
    known: dict[int, float] = {}

    def at(index: int) -> float:
        if index not in known:
            known[index] = quantity(round(index * step, 9))
        return known[index]

    low = high = max(1, round(start / step))
    while at(low) < level:
        low, high = min(low - 1, int(low / 1.2)), low
        if low < 1:
            raise ValueError(f"the rule allows no load: {at(1):.3g} for {level:g} at {step:g}")
    while at(high) >= level:
        low, high = high, max(high + 1, int(high * 1.2))
    while high - low > 1:
        part = math.log(at(low) / level) / math.log(at(low) / at(high))
        low, high = _narrowed(at, level, low, high, round(low * (high / low) ** part))
    return round(low * step, 9)


def _narrowed(at: Callable[[int], float], level: float, low: int, high: int, guess: int) -> tuple[int, int]:
    middle = min(max(guess, low + 1), high - 1)
    return (middle, high) if at(middle) >= level else (low, middle)


# --- what the rules measure -------------------------------------------------------------------------------------------


def _mean(cell: Mapping[str, Any], metric: str, model: str | None = None) -> float:
    entry = cell["metrics"][metric]
    return float((entry["by_model"][model] if model else entry)["mean"])


def provisioned(lab: Lab, rate_per_s: float) -> float:
    """KV capacity over the mean KV demand of vLLM (DP) in kunserve_fig02.yaml (claim KS-2-provision)."""
    return 1 / _demand(lab, rate_per_s, "kunserve_fig02")


def loaded(lab: Lab, rate_per_s: float, name: str, keys: Mapping[str, Any]) -> float:
    """60 % of the KV capacity over the mean KV demand of vLLM (DP) in an experiment of KunServe (claim KS-load)."""
    return 0.6 / _demand(lab, rate_per_s, name, keys)


def _demand(lab: Lab, rate_per_s: float, name: str, keys: Mapping[str, Any] | None = None) -> float:
    overrides = {
        "systems": ["vllm-dp"],
        "slo": {"ttft_s": 5},
        "sweeps": [{"name": "load", "at": {"rate_scale": rate_per_s}}],
    }
    return _mean(lab.cell(name, {**overrides, **(keys or {})}), "kv_demand_mean")


def saturated(lab: Lab, rate_per_s: float) -> float:
    """What FCFS of fig13.yaml completes a second in overload, over the rate."""
    overrides = {
        "workload.requests": 15600,
        "workload.warmup_requests": 15600,
        "systems": [{"base": "dedicated", "name": "fcfs"}],
        "slo": {"ttft_s": 10},
        "sweeps": [{"name": "load", "at": {"rate_scale": 1}}],
        "loads.base.rate_per_s": OVERLOAD_PER_S,
    }
    return _mean(lab.cell("fig13", overrides), "throughput_per_s") / rate_per_s


def sustained(lab: Lab, rate_per_s: float, models: str, use: float = 0.94) -> float:
    """Least share of their arrivals that ``models`` complete in FineServe's placement of fig12.yaml, at 8 times the rate over
    ``use``."""
    file = [each["id"] for each in yaml.safe_load((EXPERIMENTS / "fig12.yaml").read_text(encoding="utf-8"))["models"]]
    overrides = {
        "workload.requests": 24000,
        "workload.warmup_requests": 12000,
        "systems.2": "fineserve",
        "slo": {"ttft_s": 10},
        "sweeps": [{"name": "load", "at": {"rate_scale": 8 / use}, "systems": ["FineServe placement"]}],
        **{f"models.{file.index(model)}.rate_per_s": rate_per_s for model in models},
    }
    cell = lab.cell("fig12", overrides)
    return min(_mean(cell, "throughput_per_s", each) / _mean(cell, "arrival_rate_per_s", each) for each in models)


def held(lab: Lab, rate_per_s: float) -> float:
    """TTFT attainment of FineServe in fig10_load.yaml at a total rate."""
    sweep = [{"name": "rate", "at": {"rate_scale": rate_per_s, "slo_scale": 20}}]
    return _mean(lab.cell("fig10_load", {"sweeps": sweep}), "ttft_attainment")


def alone_in_time(lab: Lab, scale: float) -> float:
    """The paper's largest base TTFT, 0.13 s, over ours: the P95 TTFT of the slowest model alone (claim PR-slo-base)."""
    overrides = {
        "workload.arrivals.scale": scale,
        "systems": ["dedicated"],
        "cluster.count": 8,
        "sweeps": [{"name": "alone", "at": {"rate_scale": 0.1, "slo_scale": 1}}],
    }
    return float(0.13 / max(lab.cell("prism_fig07", overrides)["ttft_slo_s"].values()))


# --- the rules --------------------------------------------------------------------------------------------------------

_EVALUATED = "Mean KV demand of vLLM (DP) is below 60 % of the KV memory"
_FAST = {"cluster.gpu.bf16_flops_per_s": 1.248e15}
_BURST = "models.0.phases.1.rate_per_s"


def _lengths(source: str) -> dict[str, str]:
    return {"workload.lengths": source}


def _kunserve(name: str, step: float, places: Sequence[str], **keys: Any) -> Rule:
    file, _, _ = places[0].partition(":")
    return Rule(f"KunServe, {name}", _EVALUATED, partial(loaded, name=file, keys=keys), 1.0, step, tuple(places))


def _ablation(name: str, step: float, sweep: int, **keys: Any) -> Rule:
    return _kunserve(f"ablation, {name}", step, [f"kunserve_ablation:sweeps.{sweep}.at.rate_scale"], **keys)


RULES = (
    Rule(
        "KunServe, Fig. 2",
        "KV capacity is 2.1 times the mean KV demand of vLLM (DP) over 640 s",
        provisioned,
        2.1,
        0.5,
        ("kunserve_fig02:sweeps.0.at.rate_scale", "kunserve_fig15:sweeps.0.at.rate_scale"),
    ),
    _kunserve("BurstGPT", 0.5, ["kunserve_fig13:sweeps.0.at.rate_scale"], **_lengths("burstgpt")),
    _kunserve(
        "ShareGPT",
        0.2,
        [
            "kunserve_fig13:sweeps.1.at.rate_scale",
            "kunserve_fig12:sweeps.0.at.rate_scale",
            "kunserve_ablation:sweeps.0.at.rate_scale",
        ],
        **_lengths("sharegpt_multiturn_4k"),
    ),
    _kunserve(
        "LongBench",
        0.05,
        ["kunserve_fig13:sweeps.2.at.rate_scale", "kunserve_fig14:sweeps.0.at.rate_scale"],
        **_lengths("arxiv_sample_8k"),
    ),
    _kunserve(
        "LongBench, 72B",
        0.05,
        ["kunserve_fig13_72b:sweeps.0.at.rate_scale", "kunserve_fig16:sweeps.0.at.rate_scale"],
    ),
    _ablation("prefill", 0.2, 1, **_FAST),
    _ablation("burst 2.5x", 0.2, 2, **{_BURST: 2.5}),
    _ablation("both", 0.2, 3, **{_BURST: 2.5}, **_FAST),
    _ablation("both, BurstGPT", 0.5, 4, **{_BURST: 2.5}, **_FAST, **_lengths("burstgpt")),
    _ablation("both, LongBench", 0.05, 5, **{_BURST: 2.5}, **_FAST, **_lengths("arxiv_sample_8k")),
    _ablation("prefill, burst 3x", 0.2, 6, **{_BURST: 3}, **_FAST),
    Rule(
        "FineServe, load B",
        "FineServe holds 95 % at SLO scale 20 (of every eighth requests/s)",
        held,
        0.95,
        8,
        ("fig10:loads.B.rate_per_s", "fig10_ablation:loads.B.rate_per_s"),
        per=8,
    ),
    Rule(
        "FineServe, Fig. 13 and 6",
        "1.0x, and what is asked of every model of a pair, is what FCFS completes saturated",
        saturated,
        1.0,
        0.1,
        ("fig13:loads.base.rate_per_s", *(f"fig06:models.{index}.rate_per_s" for index in range(13))),
    ),
    Rule(
        "FineServe, Fig. 12, A and B",
        "At 8x their GPU is at 94 % of what it sustains, both at the same rate",
        partial(sustained, models="AB"),
        KEPT,
        0.1,
        ("fig12:models.0.rate_per_s", "fig12:models.1.rate_per_s"),
    ),
    Rule(
        "FineServe, Fig. 12, C",
        "At 8x its GPU is at 94 % of what it sustains",
        partial(sustained, models="C"),
        KEPT,
        0.02,
        ("fig12:models.2.rate_per_s",),
    ),
    Rule(
        "Prism, rate scale 1",
        "P95 TTFT of every model alone is within 0.13 s (of every twentieth factor)",
        alone_in_time,
        1.0,
        20,
        tuple(f"prism_{each}:workload.arrivals.scale" for each in ("fig07", "fig10", "fig11", "table1")),
    ),
)


# --- the table --------------------------------------------------------------------------------------------------------


def rows(only: str, lab: Lab) -> Iterator[str]:
    """A line for each rule with ``only`` in its name."""
    for rule in RULES:
        if only in rule.name:
            now = rule.measure(lab, rule.in_file)
            by_rule = rule.load(lab)
            then = rule.measure(lab, by_rule)
            yield (
                f"{rule.name}: {rule.in_file:g} in the files measures {now:.3g} for {rule.level:g}; "
                f"by the rule {by_rule:g} ({then:.3g}). {rule.says}."
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rules with this text in their names")
    parser.add_argument("--jobs", type=int, help="simulations at a time")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where simulations are kept ({OUT})")
    args = parser.parse_args(arguments)
    for row in rows(args.only, Lab(args.out, args.jobs)):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
