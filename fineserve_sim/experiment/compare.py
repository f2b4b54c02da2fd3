"""An experiment without a file: a trace and the systems to compare on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.plan import Experiment, build
from fineserve_sim.experiment.yaml_file import Document


def experiment_for_trace(
    trace: Path,
    systems: Sequence[str],
    models: Sequence[Mapping[str, Any]],
    *,
    gpu: str = "h100-sxm",
    count: int = 1,
    ttft_slo_s: float | None = None,
    slo_scale: float = 20.0,
    rate_scale: float = 1.0,
    requests: int | None = None,
    warmup_requests: int = 0,
) -> Experiment:
    """The comparison of ``systems`` on the requests of a trace file, one seed: a recorded trace has no randomness.

    ``models`` are mappings as under ``models`` in a file (id, model, precision, tp). Their ids are those of the trace,
    or they all have a ``share``, by which the requests are dealt out whatever the trace calls them. Without
    ``ttft_slo_s`` the SLO of a model is ``slo_scale`` times the P95 of its isolated TTFT. Raises ConfigError.
    """
    isolated = {"system": "dedicated", "load": "isolated", "quantile": 0.95}
    by_share = any("share" in model for model in models)
    workload = {"trace": str(trace.resolve()), "requests": requests, "warmup_requests": warmup_requests}
    data: dict[str, Any] = {
        "fineserve": 1,
        "title": f"Comparison on {trace.name}",
        "cluster": {"gpu": gpu, "count": count},
        "models": [dict(model) for model in models],
        "workload": workload | ({"assign": "share"} if by_share else {}),
        "slo": {"ttft": {"reference": isolated, "scale": slo_scale}} if ttft_slo_s is None else {"ttft_s": ttft_slo_s},
        "systems": list(systems),
        "sweeps": [{"name": "run", "at": {"rate_scale": rate_scale}}],
        "seeds": 1,
    }
    return build(Document(data, {(): "compare"}), trace.name.split(".")[0], Path.cwd())
