"""An experiment without a file: a trace and the systems to compare on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.document import Document
from fineserve_sim.experiment.file.plan import Experiment, build


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
    anchors: bool = False,
) -> Experiment:
    """The comparison of ``systems`` on the requests of a trace file, one seed: a recorded trace has no randomness.

    ``models`` are mappings as under ``models`` in a file (id, model, precision, tp). Their ids are those of the trace,
    or they all have a ``share``, by which the requests are dealt out whatever the trace calls them. Without
    ``ttft_slo_s`` the SLO of a model is ``slo_scale`` times the P95 of its isolated TTFT. ``anchors``: beside
    the systems stand the clairvoyant bound, and dedicated GPUs, as many as the models need. Raises ConfigError.
    """
    isolated = {"system": "dedicated", "load": "isolated", "quantile": 0.95}
    by_share = any("share" in model for model in models)
    workload = {"trace": str(trace.resolve()), "requests": requests, "warmup_requests": warmup_requests}
    at = {"rate_scale": rate_scale}
    sweeps: list[dict[str, Any]] = [{"name": "run", "at": at, "systems": list(systems)}]
    if anchors:
        sweeps = _with_anchors(sweeps[0], count, sum(model.get("tp", 1) for model in models))
    data: dict[str, Any] = {
        "fineserve": 1,
        "title": f"Comparison on {trace.name}",
        "cluster": {"gpu": gpu, "count": count},
        "models": [dict(model) for model in models],
        "workload": workload | ({"assign": "share"} if by_share else {}),
        "slo": {"ttft": {"reference": isolated, "scale": slo_scale}} if ttft_slo_s is None else {"ttft_s": ttft_slo_s},
        "systems": list(dict.fromkeys(system for sweep in sweeps for system in sweep["systems"])),
        "sweeps": sweeps,
        "seeds": 1,
    }
    return build(Document(data, {(): "compare"}), trace.name.split(".")[0], Path.cwd())


def model_entry(text: str) -> dict[str, Any]:
    """``NAME=MODEL:PRECISION:TP`` as an entry of ``models``; the name defaults to the model, as in the catalog. Raises
    ValueError for another text."""
    name, sign, described = text.partition("=")
    model, *rest = (described if sign else name).split(":")
    precision, tp = (*rest, "", "")[:2]
    if not name or not model or len(rest) > 2 or not (tp or "1").isdecimal():
        raise ValueError(f"--model {text}: expected NAME=MODEL:PRECISION:TP, such as A=llama-3.1-70b:fp8:2")
    return {"id": name if sign else model, "model": model, "precision": precision or "W16A16", "tp": int(tp or "1")}


def _with_anchors(sweep: dict[str, Any], count: int, needed: int) -> list[dict[str, Any]]:
    """The clairvoyant bound joins the sweep; dedicated does, too, or has one of its own with the GPUs that it needs."""
    dedicated = ["dedicated"] if needed <= count else []
    sweep = sweep | {"systems": list(dict.fromkeys([*sweep["systems"], "clairvoyant", *dedicated]))}
    if dedicated:
        return [sweep]
    own = {"name": "dedicated", "at": sweep["at"] | {"cluster.count": needed}, "systems": ["dedicated"]}
    return [sweep, own]
