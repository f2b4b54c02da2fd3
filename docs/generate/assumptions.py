"""Every assumed and fitted number, and the engines' defaults."""

from __future__ import annotations

from collections import Counter

from docs.generate.errors import read
from docs.generate.markdown import table
from fineserve_sim.catalog import deployments, gpu, model, precisions
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.latency import Provenance, StepModel

LONG = 60
"""Characters of a source beyond which it stands once below the table, where several numbers have it."""

ENGINE_REASONS = {
    "token_budget": "the papers give none; vLLM's own default has ranged from 512 to 8192",
    "max_sequences": "vLLM's default until V1 and on smaller GPUs; figures on H100s set 1024, V1's value there",
    "block_tokens": "vLLM's default",
    "memory_utilization": "vLLM's default",
    "context_bytes": "0.5 GiB of CUDA context an engine process",
    "deployment": (
        "CUDA graphs and no other host time; our figures set the generation that a paper names or must have had: "
        "`vllm-v1-eager` (FineServe), `sglang-0.5` (Prism), `vllm-v1` (KunServe), `vllm-0.5` (vTensor)"
    ),
    "batching": "vLLM's; Prism's figures have `sglang`, on which Prism ran (section 7.1)",
    "contention": "cheaper, and [the same result](../fidelity.md#contention)",
    "latency": "measured tables where they ship for the GPU (h100-sxm), rooflines elsewhere",
    "step_times": (
        "steps of real engines that `fineserve-calibrate` measured, for engines of one GPU "
        "([probes](../probes.md#an-engines-steps-as-a-step-model))"
    ),
    "step_time_factor": "as predicted; `--margin` sets it",
    "kv_offloading": "vLLM's default: none",
    "static_part": "vLLM's accounting; SGLang's for one model a GPU",
}


def latency_numbers() -> str:
    """A row for each number of the H100's step models that no published measurement gives."""
    found: dict[Provenance, dict[str, None]] = {}
    for deployed in deployments().values():
        for precision in precisions().values():
            if deployed.host_floors is not None and precision.name not in deployed.host_floors:
                continue
            for tp in (1, 2):
                step = StepModel(model("llama-3.1-8b"), precision, tp, gpu("h100-sxm"), deployed)
                for line in step.provenance():
                    if line.kind in ("assumed", "fitted"):
                        used = deployed.name if line.quantity.startswith("host.") else precision.name
                        found.setdefault(line, {})[used] = None
    times = Counter(line.source for line in found)
    notes = [
        source for source in dict.fromkeys(line.source for line in found) if times[source] > 1 and len(source) > LONG
    ]
    rows = [
        (
            f"`{line.quantity}`",
            ", ".join(f"`{name}`" for name in users),
            f"{line.value:g} {line.unit}",
            line.kind,
            f"source {notes.index(line.source) + 1}" if line.source in notes else line.source,
        )
        for line, users in found.items()
    ]
    told = "\n".join(f"* Source {number}: {source}" for number, source in enumerate(notes, 1))
    return f"{table(('quantity', 'of', 'value', 'kind', 'source or reason'), rows)}\n\n{told}"


def engine_defaults() -> str:
    settings = EngineSettings()
    rows = [(f"`{name}`", getattr(settings, name), ENGINE_REASONS[name]) for name in EngineSettings.__slots__]
    return table(("setting", "default", "source or reason"), rows)


def sensitivity() -> str:
    """What 20 % less and 20 % more of a number do to Fig. 10, where they do anything."""
    rows = read("sensitivity.csv")
    return table([name.replace("_", " ") for name in rows[0]], (tuple(row.values()) for row in rows))
