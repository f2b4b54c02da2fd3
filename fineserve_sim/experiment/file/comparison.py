"""An experiment without a file: a trace and the systems to compare on it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.catalog import published_precision
from fineserve_sim.experiment.file.degrees import least_degree
from fineserve_sim.experiment.file.document import Document, parse_value
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.plan import Experiment, build


def experiment_for_trace(
    trace: Path,
    systems: Sequence[str],
    models: Sequence[Mapping[str, Any]],
    *,
    gpu: str | Mapping[str, Any] = "h100-sxm",
    count: int = 1,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    e2e_slo_s: float | None = None,
    slo_scale: float = 20.0,
    rate_scale: float = 1.0,
    requests: int | None = None,
    warmup_requests: int = 0,
    anchors: bool = False,
    sharing: Any = None,
    seeds: int = 1,
    usd_per_gpu_hour: float | None = None,
    margin: float | None = None,
    overrides: Sequence[tuple[str, str]] = (),
) -> Experiment:
    """The comparison of ``systems`` on the requests of a trace file, one seed: a recorded trace has no randomness (but a deal
    of its requests to the models has).

    ``models`` are mappings as under ``models`` in a file (id, model, precision, tp). Their ids are the trace's, or they all
    have a ``share``, by which the requests are dealt out under any names in the trace. Without ``ttft_slo_s`` the SLO of a
    model is ``slo_scale`` times the P95 of its isolated TTFT. Limits of TPOT and from arrival to the last token are in
    seconds, and there where they are given. ``anchors``: beside the systems stand the clairvoyant bound, and dedicated GPUs,
    as many as the models need. ``sharing``: of every GPU, before the systems' own, in the words of a file. ``overrides``:
    dotted keys with YAML values, as of a file. ``margin``: steps take so many times as long as predicted. Raises ConfigError.
    """
    by_share = any("share" in model for model in models)
    workload = {"trace": str(trace.resolve()), "requests": requests, "warmup_requests": warmup_requests}
    options: dict[str, Any] = {
        "fineserve": 1,
        "title": f"Requests of {trace.name}",
        "cluster": {"gpu": gpu, "count": count, "sharing": sharing}
        | ({} if usd_per_gpu_hour is None else {"usd_per_gpu_hour": usd_per_gpu_hour}),
        "models": [dict(model) for model in models],
        "workload": workload | ({"assign": "share"} if by_share else {}),
        "engine": {} if margin is None else {"step_time_factor": margin},
        "slo": _slo(ttft_slo_s, tpot_slo_s, e2e_slo_s, slo_scale),
        "seeds": seeds,
    }
    sweep = {"name": "run", "at": {"rate_scale": rate_scale}, "systems": list(dict.fromkeys(systems))}
    found = _built(trace, options, overrides, sweep)
    if not anchors:
        return found
    needed = sum(least_degree(found.setup, model) for model in found.setup.models)
    return _built(trace, options, overrides, *_with_anchors(sweep, count, needed))


def _built(
    trace: Path, options: Mapping[str, Any], overrides: Sequence[tuple[str, str]], *sweeps: Mapping[str, Any]
) -> Experiment:
    """The experiment of these sweeps, named after the trace."""
    named = list(dict.fromkeys(system for sweep in sweeps for system in sweep["systems"]))
    data = copy.deepcopy({**options, "systems": named, "sweeps": [dict(sweep) for sweep in sweeps]})
    document = Document(data, {(): "options"})
    for key, text in overrides:
        place = f"--set {key}={text}"
        document.set(key, parse_value(text, place), place)
    return build(document, trace.name.split(".")[0], Path.cwd())


def model_entries(
    models: Sequence[str | Mapping[str, Any]], *, spread: bool | Mapping[str, float]
) -> list[dict[str, Any]]:
    """Entries of ``models``, with equal shares of the requests where they are ``spread``, or with those that it has by name;
    texts are as in ``model_entry``. A model of the catalog that texts have more than once without a name is called after its
    precision, too. Raises ValueError where shares are not of these models."""
    entries = [(model_entry(model) if isinstance(model, str) else dict(model)) for model in models]
    times = Counter(str(entry.get("id")) for entry in entries)
    for model, entry in zip(models, entries, strict=True):
        if isinstance(model, str) and times[entry["id"]] > 1 and entry["id"] == entry["model"]:
            entry["id"] = f"{entry['model']}-{entry['precision']}"
    if isinstance(spread, Mapping):
        _check_shares(spread, [entry["id"] for entry in entries])
        return [entry | {"share": spread[entry["id"]]} for entry in entries]
    return [entry | {"share": 1.0} for entry in entries] if spread else entries


def _check_shares(shares: Mapping[str, float], names: Sequence[str]) -> None:
    for name in shares:
        if name not in names:
            raise ValueError(f"--spread {name}=...: unknown model; {nearest(name, names)}")
    for name in names:
        if name not in shares:
            raise ValueError(f"--spread: no share of model {name}; give each model one, as in {name}=1")


def model_entry(text: str) -> dict[str, Any]:
    """``NAME=MODEL:PRECISION:TP`` as an entry of ``models``. The name defaults to the model, as in the catalog; the precision
    to that in which it is published. Raises ValueError for another text."""
    name, sign, described = text.partition("=")
    model, *rest = (described if sign else name).split(":")
    precision, tp = (*rest, "", "")[:2]
    if not name or not model or len(rest) > 2 or not (tp in ("", "auto") or tp.isdecimal()):
        raise ValueError(f"--model {text}: expected NAME=MODEL:PRECISION:TP, such as A=llama-3.1-70b:fp8:2 (or auto)")
    degree: int | str = tp if tp == "auto" else int(tp or "1")
    return {
        "id": name if sign else model,
        "model": model,
        "precision": precision or published_precision(model),
        "tp": degree,
    }


def _slo(ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, slo_scale: float) -> dict[str, Any]:
    isolated = {"system": "dedicated", "load": "isolated", "quantile": 0.95}
    ttft = {"ttft": {"reference": isolated, "scale": slo_scale}} if ttft_s is None else {"ttft_s": ttft_s}
    others = {"tpot_s": tpot_s, "e2e_s": e2e_s}
    return ttft | {key: limit_s for key, limit_s in others.items() if limit_s is not None}


def _with_anchors(sweep: dict[str, Any], count: int, needed: int) -> list[dict[str, Any]]:
    """The clairvoyant bound joins the sweep; dedicated does, too, or has one of its own with the GPUs that it needs."""
    dedicated = ["dedicated"] if needed <= count else []
    sweep = sweep | {"systems": list(dict.fromkeys([*sweep["systems"], "clairvoyant", *dedicated]))}
    if dedicated:
        return [sweep]
    own = {"name": "dedicated", "at": sweep["at"] | {"cluster.count": needed}, "systems": ["dedicated"]}
    return [sweep, own]
