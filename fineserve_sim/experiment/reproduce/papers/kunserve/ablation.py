"""KunServe, Fig. 14: dynamic drop, coordinated exchange, lookahead, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fineserve_sim.catalog import deployment, gpu, kv_token_bytes, model, precision
from fineserve_sim.experiment.reproduce.finished import Results, ends, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.papers.kunserve.cells import BURST_S, SLO_SCALE, known, per_run
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, ratio
from fineserve_sim.experiment.run.run_data import Floats, RunData
from fineserve_sim.latency import StepModel

PREFILL_TOKENS = 2048


def _burst_quantile(results: Results, system: str, of: Callable[[RunData], Floats], percent: float) -> Estimate:
    """A percentile over the requests that arrive in the burst."""

    def value(run: RunData) -> float:
        inside = (run.arrival_s >= BURST_S[0]) & (run.arrival_s < BURST_S[1])
        return float(np.percentile(known(of(run)[inside]), percent))

    return per_run(results, "kunserve_fig14", results.cell("kunserve_fig14", system), value)


def _burst_ratio(results: Results, of: str, over: str, what: str, percent: float) -> Estimate:
    """Percentile of one system over another's."""
    measure: Callable[[RunData], Floats] = (lambda run: run.tpot_s) if what == "TPOT" else (lambda run: run.ttft_s)
    high, low = (_burst_quantile(results, system, measure, percent) for system in (of, over))
    return ratio(high, low)


@claim("KS-14-drop", needs=("kunserve_fig14",))
def dynamic_drop(results: Results) -> Evaluation:
    found = (
        quantity(_burst_ratio(results, "vllm-dp", "kunserve-drop", "TTFT", percent), f"P{percent:g}")
        for percent in (90, 99, 99.9)
    )
    return Evaluation(tuple(found), "Requests that arrive in the burst.")


@claim("KS-14-queued", needs=("kunserve_fig14",))
def queued(results: Results) -> Evaluation:
    def late(run: RunData) -> float:
        return float(np.sum(~(run.ttft_s <= SLO_SCALE * np.nanmedian(run.ttft_s))))

    cell = results.cell("kunserve_fig14", "vllm-dp")
    return Evaluation((quantity(per_run(results, "kunserve_fig14", cell, late)),))


@claim("KS-14-drop-tpot", needs=("kunserve_fig14",))
def drop_tpot(results: Results) -> Evaluation:
    found = []
    for percent in (50, 90, 99, 99.9):
        value, half_width = _burst_ratio(results, "kunserve-drop", "vllm-dp", "TPOT", percent)
        found.append(Quantity(100 * (value - 1), 100 * half_width, f"P{percent:g}"))
    return Evaluation(ends(found), "Least and largest of P50, P90, P99, P99.9; requests that arrive in the burst.")


@claim("KS-14-coord", needs=("kunserve_fig14",))
def coordination(results: Results) -> Evaluation:
    pair = ("kunserve-drop", "kunserve-exchange")
    found = [
        Quantity(*_burst_ratio(results, *pair, "TTFT", percent), f"P{percent:g} TTFT", part=part)
        for part, percent in enumerate((99, 99.9))
    ]
    for percent in (90, 99.9):
        value, half_width = _burst_ratio(results, *pair, "TPOT", percent)
        found.append(Quantity(100 * (1 - 1 / value), 100 * half_width, f"P{percent:g} TPOT, % less", part=2))
    return Evaluation(tuple(found), "Requests that arrive in the burst.")


@claim("KS-14-exchange", needs=("kunserve_fig14",))
def exchange(results: Results) -> Evaluation:
    moved = quantity(metric(results.cell("kunserve_fig14", "kunserve-exchange"), "exchange_mean_s"), "exchange, s")
    cell = results.cell("kunserve_fig14", "vllm-dp")
    run = results.runs("kunserve_fig14", cell)[0]
    spec, bits = model("qwen2.5-14b"), precision("fp16")
    tokens = run.kv_capacity_bytes // run.gpus // kv_token_bytes(spec, bits, 1)
    decodes = int(tokens / (run.prompt_tokens + run.output_tokens).mean())
    step = StepModel(spec, bits, 1, gpu("a800"), deployment("vllm-v1"))
    prefill_s = step.prefill_s(PREFILL_TOKENS, 0, PREFILL_TOKENS)
    decode_s = step.step_s(decodes, tokens, 0, 0, 0, decodes)
    return Evaluation(
        (moved, Quantity(1000 * prefill_s, label="prefill, ms"), Quantity(1000 * decode_s, label="decode, ms")),
        f"Mean exchange; a step of {PREFILL_TOKENS:,} prompt tokens, and one of {decodes} decodes that fill a GPU's KV memory.",
    )


@claim("KS-14-bubble", needs=("kunserve_fig14",))
def bubbles(results: Results) -> Evaluation:
    found = (
        quantity(metric(results.cell("kunserve_fig14", system), "bubble_fraction"), label, 100)
        for system, label in (("kunserve-exchange", "token count"), ("kunserve", "lookahead"))
    )
    return Evaluation(tuple(found))
