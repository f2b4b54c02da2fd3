"""Prism, Fig. 7, 10 and Tables 1, 5: rates, SLO scales, GPUs. The paper asks for 99 % of requests within their limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from fineserve_sim.experiment.file.plan import Cell
from fineserve_sim.experiment.reproduce.curves import Crossing, Step, crossing, order
from fineserve_sim.experiment.reproduce.finished import MissingError, Results, ends, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import ratio

PRISM = "prism"
BASELINES = ("muxserve++", "s-partition", "qlm")
TITLES = {"muxserve++": "MuxServe++", "s-partition": "S-Partition", "qlm": "QLM", "prism": "Prism"}
TRACES = ("hyperbolic", "arena")
LEVEL = 0.99
HIGH_RATES = 0.75
"""High rates are the top quarter of a sweep."""

FIG07 = "prism_fig07"


# --- Fig. 7, rates ----------------------------------------------------------------------------------------------------


def _highest_rate(results: Results, system: str, trace: str) -> Crossing:
    cells = results.cells(FIG07, system, sweep=f"{trace}-rate")
    return crossing(cells, "rate_scale", "ttft_attainment", LEVEL, rising=False)


def _rate_over(results: Results, trace: str, baselines: Iterable[str]) -> Iterator[Quantity]:
    """Prism's rate at 99 % over each baseline's: a bound where one of the two lies outside the sweep.

    Raises MissingError where both do, on the same side.
    """
    ours = _highest_rate(results, PRISM, trace)
    for baseline in baselines:
        theirs = _highest_rate(results, baseline, trace)
        if ours.beyond and ours.beyond == theirs.beyond:
            met = "at every rate" if ours.beyond == "all" else "at no rate"
            raise MissingError(f"Prism and {TITLES[baseline]} both hold 99 % {met} of the sweep {trace}-rate.")
        least, most = ours.beyond == "all" or theirs.beyond == "none", ours.beyond == "none" or theirs.beyond == "all"
        bound = " (at least)" if least else " (at most)" if most else ""
        yield Quantity(ours.at / theirs.at, label=f"{TITLES[baseline]}{bound}")


@claim("PR-7-rate-hyp", needs=(FIG07,))
def rates_hyperbolic(results: Results) -> Evaluation:
    return Evaluation(
        tuple(_rate_over(results, "hyperbolic", ("muxserve++", "s-partition"))), _reached(results, "hyperbolic")
    )


@claim("PR-head-load", needs=(FIG07,))
def rate_over_static(results: Results) -> Evaluation:
    return Evaluation(tuple(_rate_over(results, "hyperbolic", ("s-partition",))), _reached(results, "hyperbolic"))


@claim("PR-7-rate-arena", needs=(FIG07,))
def rate_arena(results: Results) -> Evaluation:
    least = ends(list(_rate_over(results, "arena", BASELINES)))[0]
    return Evaluation((least,), _reached(results, "arena"))


def _reached(results: Results, trace: str) -> str:
    """Where each system stops holding 99 %."""
    places = {system: _highest_rate(results, system, trace) for system in (PRISM, *BASELINES)}
    listed = (f"{TITLES[system]} {_place(found)}" for system, found in places.items())
    return f"Rate scale at 99 % TTFT: {', '.join(listed)}."


def _place(found: Crossing) -> str:
    return {"none": f"under {found.at:g}", "all": f"over {found.at:g}"}.get(found.beyond, f"{found.at:.2f}")


@claim("PR-7-rate-order", needs=(FIG07,))
def order_at_high_rate(results: Results) -> Evaluation:
    ranks = (PRISM, "muxserve++", "s-partition", "qlm")
    steps = []
    for trace in TRACES:
        last = [results.cells(FIG07, system, sweep=f"{trace}-rate")[-1] for system in ranks]
        for high, low in pairwise(last):
            place = f"{trace}: {TITLES[high['system']]} over {TITLES[low['system']]}"
            steps.append(Step(place, metric(high, "ttft_attainment"), metric(low, "ttft_attainment")))
    return order(steps)


@claim("PR-7-rate-tpot", needs=(FIG07,))
def tpot_at_high_rates(results: Results) -> Evaluation:
    steps = []
    for trace in TRACES:
        ours = results.cells(FIG07, PRISM, sweep=f"{trace}-rate")
        most = max(cell["axes"]["rate_scale"] for cell in ours)
        for baseline in BASELINES:
            for high, low in zip(ours, results.cells(FIG07, baseline, sweep=f"{trace}-rate"), strict=True):
                rate = high["axes"]["rate_scale"]
                if rate >= HIGH_RATES * most:
                    place = f"{trace}, {TITLES[baseline]}, rate {rate:g}"
                    steps.append(Step(place, metric(high, "tpot_attainment"), metric(low, "tpot_attainment")))
    return order(steps)


@claim("PR-head-attain", needs=(FIG07,))
def best_attainment(results: Results) -> Evaluation:
    """Largest ratio of Prism's TTFT attainment over the best baseline's at the same point, over the sweeps of Fig. 7."""
    found = []
    for sweep in (f"{trace}-{what}" for trace in TRACES for what in ("rate", "slo")):
        rows = [results.cells(FIG07, system, sweep=sweep) for system in (PRISM, *BASELINES)]
        for ours, *others in zip(*rows, strict=True):
            best = max(others, key=lambda cell: metric(cell, "ttft_attainment").mean)
            value = ratio(metric(ours, "ttft_attainment"), metric(best, "ttft_attainment"))
            found.append(quantity(value, f"{sweep}, over {TITLES[best['system']]}"))
    return Evaluation((ends(found)[-1],), f"Largest over {len(found)} points of rates and SLO scales.")


# --- Fig. 7, SLO scales -----------------------------------------------------------------------------------------------


def _tightest(results: Results, system: str, trace: str, name: str) -> Quantity:
    cells = results.cells(FIG07, system, sweep=f"{trace}-slo")
    found = crossing(cells, "slo_scale", name, LEVEL, rising=True)
    label = f"{TITLES[system]}, {name[:4].upper()}"
    if found.beyond == "none":
        return Quantity(math.nan, label=f"{label}: over {found.at:g}")
    return Quantity(found.at, label=label + (" (at most)" if found.beyond == "all" else ""))


@claim("PR-7-slo-hyp", needs=(FIG07,))
def slo_on_hyperbolic(results: Results) -> Evaluation:
    return _slo_of_prism(results, "hyperbolic")


@claim("PR-7-slo-arena", needs=(FIG07,))
def slo_on_arena(results: Results) -> Evaluation:
    return _slo_of_prism(results, "arena")


def _slo_of_prism(results: Results, trace: str) -> Evaluation:
    found = (_tightest(results, PRISM, trace, name) for name in ("ttft_attainment", "tpot_attainment"))
    return Evaluation(tuple(found), "SLO scale at which 99 % are met, between the points of the sweep.")


@claim("PR-7-slo-tpot", needs=(FIG07,))
def slo_of_baselines(results: Results) -> Evaluation:
    pairs = (("s-partition", "hyperbolic"), ("qlm", "arena"))
    return Evaluation(tuple(_tightest(results, system, trace, "tpot_attainment") for system, trace in pairs))


@claim("PR-7-slo-baselines", needs=(FIG07,))
def loosest_slo(results: Results) -> Evaluation:
    found = []
    for trace in TRACES:
        last = [results.cells(FIG07, system, sweep=f"{trace}-slo")[-1] for system in BASELINES]
        best = max(last, key=lambda cell: metric(cell, "ttft_attainment").mean)
        found.append(quantity(metric(best, "ttft_attainment"), f"{trace}, {TITLES[best['system']]}", 100))
    return Evaluation(tuple(found), "At the largest SLO scale of each sweep.")


@claim("PR-slo-base", needs=(FIG07,))
def base_slos(results: Results) -> Evaluation:
    """Least and largest base SLO of a model, TTFT in s and TPOT in ms, over both traces."""
    cells = [results.cell(FIG07, PRISM, sweep=f"{trace}-slo") for trace in TRACES]
    found = []
    for part, (key, unit_s) in enumerate((("ttft_slo_s", 1.0), ("tpot_slo_s", 1000.0))):
        bases = [limit * unit_s / cell["axes"]["slo_scale"] for cell in cells for limit in cell[key].values()]
        found += [Quantity(value, label=key[:4].upper(), part=part) for value in (min(bases), max(bases))]
    return Evaluation(tuple(found), "P95 of each model alone: least and largest of eight models on two traces.")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _fewest(cells: Iterable[Cell], names: Iterable[str]) -> int:
    """The fewest GPUs from which on 99 % hold for all metrics; one more than the sweep has where they never do."""
    names = tuple(names)
    held = {
        int(cell["axes"]["cluster.count"]): all(metric(cell, name).mean >= LEVEL for name in names) for cell in cells
    }
    counts = sorted(held)
    fewest = counts[-1] + 1
    for count in reversed(counts):
        if not held[count]:
            break
        fewest = count
    return fewest


@claim("PR-7-gpus", needs=("prism_fig07_gpus",))
def gpus_of_18_models(results: Results) -> Evaluation:
    ours, theirs = [], []
    for trace in TRACES:
        sweep = f"{trace}-gpus"
        cells = results.cells("prism_fig07_gpus", PRISM, sweep=sweep)
        ours.append(Quantity(float(_fewest(cells, ("ttft_attainment", "tpot_attainment"))), label=f"Prism, {trace}"))
        for system in BASELINES:
            count = _fewest(results.cells("prism_fig07_gpus", system, sweep=sweep), ("ttft_attainment",))
            theirs.append(Quantity(float(count), label=f"{TITLES[system]}, {trace}"))
    return Evaluation((*ours, ends(theirs)[0]), "The last is the best baseline, TTFT alone; 9 stands for more than 8.")


@claim("PR-T1-gpus", needs=("prism_table1",))
def gpus_of_8_models(results: Results) -> Evaluation:
    systems = {"s-partition": "S-Partition", "muxserve": "MuxServe", "qlm": "QLM", "prism": "Prism"}
    found = [Quantity(float(results.runs("prism_table1", _dedicated(results))[0].gpus), label="Dedicated")]
    for system, title in systems.items():
        count = _fewest(results.cells("prism_table1", system, sweep="gpus"), ("ttft_attainment",))
        found.append(Quantity(float(count), label=title))
    return Evaluation(tuple(found), "99 % TTFT attainment; 9 stands for more than 8; Dedicated has a GPU a model.")


def _dedicated(results: Results) -> Cell:
    return results.cell("prism_table1", "dedicated", sweep="dedicated")


# --- the other figures and tables -------------------------------------------------------------------------------------


@claim("PR-10-global", needs=("prism_fig10",))
def global_scheduler(results: Results) -> Evaluation:
    steps = []
    for name in ("ttft_attainment", "tpot_attainment"):
        pairs = zip(results.cells("prism_fig10", "global"), results.cells("prism_fig10", "without"), strict=True)
        for on, off in pairs:
            place = f"{name[:4].upper()}, rate {on['axes']['rate_scale']:g}"
            steps.append(Step(place, metric(on, name), metric(off, name)))
    return order(steps)


def _table5(results: Results, names: Iterable[tuple[str, float, str]]) -> tuple[Quantity, ...]:
    """Each metric for MuxServe, then MuxServe++."""
    cells = {
        title: results.cell("prism_table5", name) for title, name in (("MuxServe", "muxserve"), ("++", "muxserve++"))
    }
    return tuple(
        quantity(metric(cell, name), f"{title} {label}", scale)
        for name, scale, label in names
        for title, cell in cells.items()
    )


@claim("PR-T5-mux", needs=("prism_table5",))
def mux_latencies(results: Results) -> Evaluation:
    names = [
        (f"{moment}_{which}_s", 1000.0 if moment == "tpot" else 1.0, f"{which} {moment.upper()}")
        for moment in ("ttft", "tpot", "e2e")
        for which in ("mean", "p95")
    ]
    return Evaluation(_table5(results, names), "TPOT in ms, the others in s.")


@claim("PR-T5-tput", needs=("prism_table5",))
def mux_throughput(results: Results) -> Evaluation:
    names = [("throughput_per_s", 1.0, "requests/s"), ("token_throughput_per_s", 1.0, "tokens/s")]
    return Evaluation(_table5(results, names), "Output lengths are ShareGPT's, the paper's are not given.")
