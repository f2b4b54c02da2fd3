"""Which function over which experiments decides which claim, beside those that experiment files state themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fineserve_sim.experiment.reproduce import fineserve, kunserve, prism, vtensor
from fineserve_sim.experiment.reproduce.judge import Evaluation
from fineserve_sim.experiment.reproduce.measured import Results


class Simulated(NamedTuple):
    """An evaluator and the experiments, by name, whose results it reads."""

    evaluate: Callable[[Results], Evaluation]
    experiments: tuple[str, ...] = ()


SIMULATED: Mapping[str, Simulated] = MappingProxyType(
    {
        "FS-3-order": Simulated(fineserve.slopes, ("fig03",)),
        "FS-6-tokens-per-mem": Simulated(fineserve.tokens_per_memory, ("fig06",)),
        "FS-6-all-gain": Simulated(partial(fineserve.pair_throughput, wanted=lambda pair: True), ("fig06",)),
        "FS-6-fp8fp8": Simulated(partial(fineserve.pair_throughput, wanted=lambda pair: pair == "FP8-FP8"), ("fig06",)),
        "FS-9-ttft": Simulated(partial(fineserve.driver_calls, what="ttft_mean_s"), ("fig09",)),
        "FS-9-tpot": Simulated(partial(fineserve.driver_calls, what="tpot_mean_s"), ("fig09",)),
        "FS-alg2-anchor": Simulated(fineserve.anchor),
        "FS-alg2-vs-mh": Simulated(fineserve.batch_misses),
        "PR-slo-base": Simulated(prism.base_slos, (prism.FIG07,)),
        "PR-7-rate-hyp": Simulated(prism.rates_hyperbolic, (prism.FIG07,)),
        "PR-7-rate-arena": Simulated(prism.rate_arena, (prism.FIG07,)),
        "PR-7-rate-order": Simulated(prism.order_at_high_rate, (prism.FIG07,)),
        "PR-7-rate-tpot": Simulated(prism.tpot_at_high_rates, (prism.FIG07,)),
        "PR-head-attain": Simulated(prism.best_attainment, (prism.FIG07,)),
        "PR-head-load": Simulated(prism.rate_over_static, (prism.FIG07,)),
        "PR-7-slo-hyp": Simulated(partial(prism.slo_of_prism, trace="hyperbolic"), (prism.FIG07,)),
        "PR-7-slo-arena": Simulated(partial(prism.slo_of_prism, trace="arena"), (prism.FIG07,)),
        "PR-7-slo-baselines": Simulated(prism.loosest_slo, (prism.FIG07,)),
        "PR-7-slo-tpot": Simulated(prism.slo_of_baselines, (prism.FIG07,)),
        "PR-7-gpus": Simulated(prism.gpus_of_18_models, ("prism_fig07_gpus",)),
        "PR-T1-gpus": Simulated(prism.gpus_of_8_models, ("prism_table1",)),
        "PR-3-T1": Simulated(prism.both_active, ("prism_fig03",)),
        "PR-3-T2": Simulated(prism.one_surges, ("prism_fig03",)),
        "PR-8-kv": Simulated(prism.kv_after_surge, ("prism_fig08",)),
        "PR-8-throughput": Simulated(prism.tokens_after_surge, ("prism_fig08",)),
        "PR-10-global": Simulated(prism.global_scheduler, ("prism_fig10",)),
        "PR-T5-mux": Simulated(prism.mux_latencies, ("prism_table5",)),
        "PR-T5-tput": Simulated(prism.mux_throughput, ("prism_table5",)),
        "PR-5.1-overhead": Simulated(prism.overhead, ("prism_sec51",)),
        "KS-2-burst": Simulated(kunserve.burst_memory, ("kunserve_fig02",)),
        "KS-2-rate": Simulated(kunserve.arrivals, ("kunserve_fig13",)),
        "KS-2-stay": Simulated(kunserve.stay, ("kunserve_fig02",)),
        "KS-2-events": Simulated(kunserve.events, ("kunserve_fig02",)),
        "KS-2-provision": Simulated(kunserve.provision, ("kunserve_fig02",)),
        "KS-2-spikes": Simulated(kunserve.spikes, ("kunserve_fig13",)),
        "KS-5": Simulated(kunserve.stages, ("kunserve_fig05",)),
        "KS-4.2-stall": Simulated(kunserve.stall, ("kunserve_fig13",)),
        "KS-load": Simulated(kunserve.load, ("kunserve_fig13",)),
        "KS-13-p99ttft": Simulated(kunserve.p99_ttft, ("kunserve_fig13",)),
        "KS-12-coincide": Simulated(kunserve.coincide, ("kunserve_fig12",)),
        "KS-12-pp": Simulated(kunserve.pipeline_throughput, ("kunserve_fig13",)),
        "KS-12-pp-tail": Simulated(kunserve.pipeline_tail, ("kunserve_fig13",)),
        "KS-13-tpot-lb": Simulated(kunserve.median_tpot, ("kunserve_fig13",)),
        "KS-13-p50ttft-lb": Simulated(kunserve.median_ttft, ("kunserve_fig13",)),
        "KS-13-swap-tpot": Simulated(kunserve.swap_tail, ("kunserve_fig13",)),
        "KS-13-slo": Simulated(kunserve.violations, ("kunserve_fig13",)),
        "KS-13-slo4": Simulated(kunserve.few_violations, ("kunserve_fig13",)),
        "KS-13-tail": Simulated(kunserve.tails, ("kunserve_fig13",)),
        "KS-13-72b": Simulated(kunserve.large_model, ("kunserve_fig13_72b",)),
        "KS-14-drop": Simulated(kunserve.dynamic_drop, ("kunserve_fig14",)),
        "KS-14-queued": Simulated(kunserve.queued, ("kunserve_fig14",)),
        "KS-14-drop-tpot": Simulated(kunserve.drop_tpot, ("kunserve_fig14",)),
        "KS-14-coord": Simulated(kunserve.coordination, ("kunserve_fig14",)),
        "KS-14-exchange": Simulated(kunserve.exchange, ("kunserve_fig14",)),
        "KS-14-bubble": Simulated(kunserve.bubbles, ("kunserve_fig14",)),
        "VT-1-slowdown": Simulated(vtensor.slowdown, ("vtensor_fig10",)),
        "VT-avg": Simulated(vtensor.average, ("vtensor_fig09", "vtensor_fig10", "vtensor_fig10_sharing")),
    }
)
