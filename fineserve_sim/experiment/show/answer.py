"""The answer in sentences: the choice, its cost, the causes of its misses, what binds it and where it breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.file.metric_names import EACH, overall
from fineserve_sim.experiment.results.answer import chosen_cell, name_of, place_of
from fineserve_sim.experiment.show.against import answer_against
from fineserve_sim.experiment.show.labels import axis_text, number
from fineserve_sim.experiment.show.model_error import error_text
from fineserve_sim.experiment.show.out_of_reach import changes_text, out_of_reach_lines

Cell = Mapping[str, Any]

MEANINGS = {
    "prompt": "out of reach (the prompt itself takes longer)",
    "late": "late (first token)",
    "slow": "slow (time a token)",
    "overdue": "overdue (last token)",
    "cut_memory": "cut (KV memory of the engine)",
    "cut_context": "cut (context of the model)",
    "dropped": "dropped",
    "rejected": "rejected (no engine can hold the prompt)",
    "unplaced": "unplaced",
    "unfinished": "unfinished",
}
_MOMENTS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "slo": "all limits"}
_WHATS = {
    "prompt": "the prompt itself, which takes longer than the limit on an idle engine",
    "placement": "the placement",
    "policy": "the policy's own rule (it drops what it expects to be late)",
    "bursts": "bursts, too short for a queue to be seen",
    "weights": "weights that are not on a GPU when requests come",
    "slots": "slots (engine.max_sequences)",
    "context": "the context of the model",
}


def answer_lines(summary: Mapping[str, Any]) -> list[str]:
    """The answer block of a summary, a sentence or two a line; none where there was nothing to choose."""
    answer, cell = summary.get("answer"), chosen_cell(summary)
    if not answer or cell is None:
        return []
    lines = [
        f"{_where(answer, cell, summary['cells'])}{_choice(answer, cell)}",
        *beyond_lines(answer, cell),
        *_gpus(answer, cell),
        _cost(cell, summary["price"]),
        *([told] if (told := answer_against(summary)) else []),
        _misses(cell),
    ]
    lines += [" ".join(sentences)] if (sentences := list(_binding(cell))) else []
    band = answer.get("search", {}).get("gpus", {}).get("band")
    lines += [error_text(band)] if band else []
    load = f"Limits: {limits_text(cell)}. Load: {place_text(cell)}; {' '.join(_load(answer, cell, summary['cells']))}"
    return [*lines, load]


def _where(answer: Mapping[str, Any], cell: Cell, cells: Sequence[Cell]) -> str:
    """The place of the answer, where there are others."""
    axes = [axis for axis, _ in place_of(cell) if len({str(other["axes"].get(axis)) for other in cells}) > 1]
    if not axes:
        return ""
    place = ", ".join(lowered(axis_text(axis, cell["axes"][axis])) for axis in axes)
    why = ", as the file asks" if "at" in answer else ", where the systems differ most" * (answer["systems"] > 1)
    return f"At {place}{why}: "


def answer_of(summary: Mapping[str, Any]) -> list[str]:
    """The answer block with the models that have no GPU; empty where there was nothing to choose."""
    cell = chosen_cell(summary)
    if cell is None:
        return []
    here = [each for each in summary["cells"] if place_of(each) == place_of(cell)]
    return [*answer_lines(summary), *unplaced_lines(here)]


def unplaced_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """One line a reason for which models have no GPU: which, with their part of the requests, and under which systems."""
    told: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for why, models in _unplaced(cell).items():
            told.setdefault(why, {}).setdefault(models, []).append(name_of(cell, cells))
    for why, found in told.items():
        whose = "; ".join(f"{models} under {', '.join(dict.fromkeys(titles))}" for models, titles in found.items())
        yield f"UNPLACED on {why}: {whose}."


def _unplaced(cell: Cell) -> dict[str, str]:
    """By GPUs and reason: which models, and what part of the requests they get."""
    by_reason: dict[str, list[str]] = {}
    for entry in cell["unplaced"]:
        by_reason.setdefault(f"{gpus_text(cell)} ({entry['why']})", []).append(entry["model"])
    start = ", at the start" if cell["models_move"] else ""
    requests = max(1, cell["requests"])
    return {
        why: f"{', '.join(models)} ({percent(sum(cell['models'][name]['requests'] for name in models) / requests)}{start})"
        for why, models in by_reason.items()
    }


def limits_text(cell: Cell) -> str:
    """The limits of a cell in seconds: one number where all models have the same, else from the least to the most."""
    parts = []
    for moment, name in _MOMENTS.items():
        limit_s = cell.get(f"{moment}_slo_s")
        if limit_s:
            least, most = (pick(limit_s, key=lambda model: limit_s[model]) for pick in (min, max))
            span = f"{number(float(limit_s[least]))} s"
            if limit_s[least] != limit_s[most]:
                span += f" ({least}) to {number(float(limit_s[most]))} s ({most})"
            parts.append(f"{name} {span}")
    return ", ".join(parts)


def place_text(cell: Cell) -> str:
    """Where the cell is, its cluster apart, with its load in requests a second."""
    rate = cell["metrics"]["arrival_rate_per_s"]["mean"]
    axes = [lowered(axis_text(axis, value)) for axis, value in place_of(cell) if axis != "slo_scale" or cell["derived"]]
    return ", ".join([*axes, *([] if rate is None else [f"{number(rate)} requests/s"])])


def lowered(text: str) -> str:
    """Within a sentence: ``rate scale 2``, but ``SLO scale 5``."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def gpus_text(cell: Cell) -> str:
    """``8 h100-sxm``, ``1 h100-sxm in slices (3 of 2g)`` or ``12 GPUs (8 h100-sxm, 4 l40s)``."""
    cluster = cell["cluster"]
    slices = f" in slices ({cluster['slices']})" if "slices" in cluster else ""
    return f"{cluster['count']} {cluster['gpu']}{slices}"


def percent(share: float | None, half_width: float | None = None) -> str:
    """``90.8 %``, with its interval where there is one."""
    if share is None:
        return "–"
    return f"{100 * share:.1f} %" if half_width is None else f"{100 * share:.1f} ± {100 * half_width:.1f} %"


def dollars(value: float) -> str:
    """With cents; two digits of what is less than ten cents."""
    return f"{value:,.2f}" if value >= 0.1 else number(float(f"{value:.2g}"))


def cheapest_text(prices: Iterable[tuple[str, float | None]]) -> str:
    """The words for the first of several answers: ``The cheapest that keeps``, where all prices are known."""
    unknown = dict.fromkeys(gpu for gpu, usd in prices if usd is None)
    if not unknown:
        return "The cheapest that keeps"
    return f"The fewest GPUs (no price is known for {', '.join(unknown)}) that keep"


def targets_text(targets: Mapping[str, float]) -> str:
    """``95 % of the requests within their limits``."""
    if len(targets) == 1 and "slo_attainment" in targets:
        return f"{100 * targets['slo_attainment']:g} % of the requests within their limits"
    return ", ".join(f"{100 * share:g} % {_whose(metric)}" for metric, share in targets.items())


def _whose(metric: str) -> str:
    """``within the limit of TTFT``, of all requests or of each model's."""
    moment = overall(metric).removesuffix("_attainment")
    limit = "all limits" if moment == "slo" else f"the limit of {_MOMENTS[moment]}"
    return f"of each model's requests within {limit}" if metric.startswith(EACH) else f"within {limit}"


def _choice(answer: Mapping[str, Any], cell: Cell) -> str:
    """What to take: the chosen system where it keeps the targets, the cluster that the search found where it does not."""
    choice, targets = answer["choice"], targets_text(answer["targets"])
    found = _margins(choice["margins"])
    rivals = answer["as_good"]
    as_good = f" No worse within the interval: {', '.join(rivals)}." if rivals else ""
    own = f"{choice['title']} on {gpus_text(cell)}"
    if choice["holds"]:
        homeless = () if cell["models_move"] else [entry["model"] for entry in cell["unplaced"]]
        return f"Take {own}, which keeps {targets}: {found}.{_left_out(homeless)}{as_good}"
    if "gpus" in answer.get("search", {}):
        return f"{_found(answer, cell, targets)} {_asked(answer, cell)}: {found}.{as_good}"
    systems, most = answer["systems"], answer["most_gpus"]
    up_to = f"up to {most}" if most > choice["gpus"] else str(choice["gpus"])
    who = f"None of {systems} systems keeps" if systems > 1 else f"{choice['title']} does not keep"
    return f"{who} {targets} on {up_to} {cell['cluster']['gpu']}. Closest: {own}: {found}.{as_good}"


def _left_out(models: Sequence[str]) -> str:
    """Models without a GPU, where so few requests are theirs that the targets are kept without them."""
    return f" It has no GPU for {', '.join(models)}." if models else ""


def _found(answer: Mapping[str, Any], cell: Cell, targets: str) -> str:
    """The outcome of the search for more GPUs."""
    found, gpu = answer["search"]["gpus"], cell["cluster"]["gpu"]
    if "out_of_reach" in found:
        bounds = found["out_of_reach"]["bounds"]
        beyond = ", ".join(f"{100 * share:.1f} %" for share in bounds.values())
        return f"No number of {gpu} keeps {targets}: {beyond} at most are within reach, each model alone on idle GPUs."
    if found["value"] is None:
        tried = f"on the numbers of {gpu} that were tried, up to {found['most']}"
        return f"No system keeps {targets} {tried} ({found['title']} {found['why']})."
    where = f"{found['title']} on {found['value']} {gpu}{_band(found)}{_hourly(found['usd_per_hour'])}"
    left_out = _left_out(found.get("unplaced", ()))
    more = f" ({found['not_on']} fail: more GPUs are another placement)" if found["not_on"] else ""
    return f"Take {where}, the fewest found that keep {targets}: {_margins(found['margins'])}{more}.{left_out}"


def beyond_lines(answer: Mapping[str, Any], cell: Cell) -> Iterator[str]:
    """Which models are out of reach on any number of GPUs, and what another precision or degree of them would come to."""
    search = answer.get("search", {})
    yield from out_of_reach_lines(search.get("gpus", {}).get("out_of_reach", {}).get("models", ()))
    for changed in search.get("changed", ()):
        shares = ", ".join(f"{100 * share:.1f} %" for share in changed["shares"].values())
        keeps = f"keeps the targets with {shares}" if changed["holds"] else f"comes to {shares}"
        reach = ", ".join(f"{100 * share:.1f} %" for share in (changed["bounds"] or {}).values())
        within = "" if changed["holds"] or not reach else f"; {reach} would be within reach"
        yield f"With {changes_text(changed['changes'])}, {answer['choice']['title']} on {gpus_text(cell)} {keeps}{within}."


def _band(found: Mapping[str, Any]) -> str:
    """How many GPUs it may be with the error of the model itself."""
    return f" ({found['band']['text']} with the model's error)" if found.get("band") else ""


def _hourly(usd: float | None) -> str:
    return "" if usd is None else f", ${usd:,.2f} an hour"


def _asked(answer: Mapping[str, Any], cell: Cell) -> str:
    """On the GPUs that were asked for no system keeps the targets; which one comes closest."""
    title = answer["choice"]["title"]
    closest = f"none does; closest {title}" if answer["systems"] > 1 else f"{title} comes to"
    return f"On {cell['cluster']['count']} {closest}"


def _margins(margins: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(_margin(metric, margin, len(margins)) for metric, margin in margins.items())


def _margin(metric: str, margin: Mapping[str, Any], targets: int) -> str:
    points = 100 * margin["margin"]
    sure = "" if margin["sure"] else ", within its interval"
    if margin["half_width"] is None:
        sure = ", of too few requests for an interval"
    side = f"{abs(points):.1f} points {'above' if points >= 0 else 'below'}{sure}"
    moment = _MOMENTS[overall(metric).removesuffix("_attainment")]
    name = f"worst model, {moment} " if metric.startswith(EACH) else "" if targets == 1 else f"{moment} "
    return f"{name}{percent(margin['mean'], margin['half_width'])}, {side}"


def _cost(cell: Cell, price: Mapping[str, Any]) -> str:
    cost = cell["cost"]
    if cost["usd_per_hour"] is None:
        return f"Cost: no price is known for {_unpriced(cell)}; give one with cluster.usd_per_gpu_hour or --price."
    whose = "as given"
    if price["default"]:
        whose = f"by default, {price['source']} of {price['read_on']}; --price"
    parts = [f"${cost['usd_per_hour']:,.2f} an hour"]
    for key, text in (
        ("usd_per_mtoken", "a million output tokens"),
        ("usd_per_1000_within", "a thousand requests within limits"),
    ):
        if cost[key] is not None:
            parts.append(f"${dollars(cost[key])} {text}")
    each = f"${cost['usd_per_hour'] / cell['cluster']['count']:,.2f} a GPU-hour"
    if "cost_by_kind" in cell:
        each = ", ".join(f"{kind['gpu']} ${kind['usd_per_gpu_hour']:,.2f} a GPU-hour" for kind in cell["cost_by_kind"])
    return f"Cost of {gpus_text(cell)}: {', '.join(parts)} ({each} {whose})."


def _unpriced(cell: Cell) -> str:
    """The kinds of GPU without a known price."""
    kinds = cell.get("cost_by_kind", ())
    return ", ".join(kind["gpu"] for kind in kinds if kind["usd_per_gpu_hour"] is None) or str(cell["cluster"]["gpu"])


def _misses(cell: Cell) -> str:
    total = sum(cell["misses"].values())
    if not total:
        return "Misses: none."
    parts = [
        f"{percent(count / cell['requests'])} {_rejected(cell) if cause == 'rejected' else MEANINGS[cause]}"
        for cause, count in sorted(cell["misses"].items(), key=lambda item: -item[1])
        if count
    ]
    worst = worst_models(cell)
    models = f" Worst: {', '.join(worst)} within." if len(cell["models"]) > 1 and worst else ""
    return f"Misses: {', '.join(parts)}.{models}"


def _rejected(cell: Cell) -> str:
    """Why requests were turned away, with the contexts of their models, which may be too short for a prompt."""
    told = [f"; the context of {name} is {tokens:,} tokens" for name, tokens in cell.get("context_tokens", {}).items()]
    return f"{MEANINGS['rejected'].removesuffix(')')}{''.join(told[:3])})"


def worst_models(cell: Cell, most: int = 2) -> list[str]:
    """The models with the lowest share within their limits, below the cell's own, with their shares."""
    shares = {name: model["within"] / model["requests"] for name, model in cell["models"].items() if model["requests"]}
    own = cell["metrics"]["slo_attainment"]["mean"] or 0.0
    low = sorted((name for name in shares if shares[name] < own), key=lambda name: shares[name])
    return [f"{name} {min(100 * shares[name], 99.9):.{1 if shares[name] > 0.99 else 0}f} %" for name in low[:most]]


def _binding(cell: Cell) -> Iterator[str]:
    total = sum(entry["misses"] for entry in cell["binds"])
    if not total:
        return
    parts = [_bind(entry, total, cell) for entry in cell["binds"] if entry["misses"] >= 0.1 * total]
    yield f"Binds: {'; '.join(parts)}."
    first = cell["binds"][0]
    others = [gpu["waiting"] for gpu in cell["gpus"] if gpu["gpu"] not in first["gpus"]]
    mean = sum(others) / len(others) if others else 1.0
    if first["waiting"] >= 0.5 and mean < first["waiting"] / 4:
        waits = f"Requests wait there {100 * first['waiting']:.0f} % of the time"
        yield f"{waits}, on the other {len(others)} GPUs {100 * mean:.0f} %: another placement has room."


def _bind(entry: Mapping[str, Any], total: int, cell: Cell) -> str:
    what = _WHATS.get(entry["what"], entry["what"])
    models = sorted(entry["models"], key=lambda name: -entry["models"][name])
    named = ", ".join(models[:4]) + (f" and {len(models) - 4} more" if len(models) > 4 else "")
    who = f": {named}" if len(cell["models"]) > 1 else ""
    where = ""
    if entry["gpus"] and len(entry["gpus"]) < len(cell["gpus"]):
        where = f" on GPU {', '.join(map(str, entry['gpus'][:8]))}{'…' * (len(entry['gpus']) > 8)}"
    return f"{what}{where} ({100 * entry['misses'] / total:.0f} % of misses{who})"


def _load(answer: Mapping[str, Any], cell: Cell, cells: Sequence[Cell]) -> Iterator[str]:
    """Where it breaks: found by a search, or read off the rates of the sweep."""
    if "search" in answer:
        yield from _searched(answer, cell)
        return
    breaks = answer["breaks"][cell["system"]]
    base, holds = _base_per_s(answer, cell), f"{answer['choice']['title']} holds"
    held, failing = breaks["holds_to"], breaks["fails_at"]
    if len(_rates(cell, cells)) < 2:
        yield "no other rate was run here."
    elif failing is not None and held is not None:
        yield f"of the rates that were run, {holds} up to {_rate(held, base)}, no longer at {_rate(failing, base)}."
    elif held is not None:
        yield f"{holds} at every rate that was run, up to {_rate(held, base)}."
    else:
        yield f"{answer['choice']['title']} fails at {_rate(failing, base)}, the lowest rate here."


def breaks_text(summary: Mapping[str, Any]) -> str:
    """What breaks first and at which load, for the chosen system: ``First to break: bandwidth on GPU 1 (chat), ...``."""
    answer, cell = summary.get("answer"), chosen_cell(summary)
    if not answer or cell is None:
        return ""
    several = "search" in answer or len(_rates(cell, summary["cells"])) > 1
    load = " ".join(_load(answer, cell, summary["cells"])) if several else ""
    told, binds, worst = load[:1].upper() + load[1:], cell["binds"], worst_models(cell, 1)
    if not binds:
        return told
    first = binds[0]
    models = sorted(first["models"], key=lambda name: -first["models"][name])[:3]
    where = f" on GPU {', '.join(map(str, first['gpus'][:8]))}" if first["gpus"] else ""
    low = f" Worst model: {worst[0]} within its limits." if worst and len(cell["models"]) > 1 else ""
    what = _WHATS.get(first["what"], first["what"])
    return f"First to break: {what}{where} ({', '.join(models)}).{low} {told}".rstrip()


def _rates(cell: Cell, cells: Sequence[Cell]) -> set[float]:
    """The rate scales that there are of a cell's system at its other axes."""

    def rest(of: Cell) -> dict[str, Any]:
        return {axis: value for axis, value in of["axes"].items() if axis != "rate_scale"}

    return {
        other["axes"]["rate_scale"]
        for other in cells
        if other["system"] == cell["system"] and rest(other) == rest(cell)
    }


def _searched(answer: Mapping[str, Any], cell: Cell) -> Iterator[str]:
    """The result of the search along the rate for the chosen system."""
    rate, base = answer["search"]["rate"], _base_per_s(answer, cell)
    holds = f"{answer['choice']['title']} on {cell['cluster']['count']} holds"
    if rate["value"] is None and not rate["least"]:
        yield f"{holds} at no rate."
    elif rate["value"] is None:
        yield f"{holds} at no rate down to {_rate(rate['least'], base)}."
    elif rate["fails_at"] is None:
        yield f"{holds} up to {_rate(rate['value'], base)}, the highest that was tried."
    else:
        yield f"{holds} up to {_rate(rate['value'], base)}, breaks at {_rate(rate['fails_at'], base)}."


def _gpus(answer: Mapping[str, Any], cell: Cell) -> Iterator[str]:
    """Fewer GPUs for a system that keeps the targets; where none does, ``_found`` has told already."""
    if "gpus" not in answer.get("search", {}) or not answer["choice"]["holds"]:
        return
    found = answer["search"]["gpus"]
    if found["value"] == cell["cluster"]["count"]:
        fewest = f"{found['value']} {'is' if found['value'] == 1 else 'are'} the fewest"
        yield f"GPUs: at this load {fewest} on which {found['title']} keeps the targets{_band(found)}."
    else:
        keeps = f"{found['title']} keeps the targets on {found['value']}{_band(found)}"
        left_out = _left_out(found.get("unplaced", ()))
        yield f"GPUs: at this load {keeps}: {_margins(found['margins'])}{_hourly(found['usd_per_hour'])}.{left_out}"


def _base_per_s(answer: Mapping[str, Any], cell: Cell) -> float | None:
    """Requests a second at rate scale 1."""
    return answer["requests_per_s"] / cell["axes"]["rate_scale"] if answer["requests_per_s"] else None


def _rate(scale: float, base_per_s: float | None) -> str:
    per_s = "" if base_per_s is None else f" ({number(scale * base_per_s)} requests/s)"
    return f"rate scale {number(scale)}{per_s}"
