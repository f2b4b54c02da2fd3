"""How much of a GPU several models keep together: their output over that of one model with as many requests on the GPU.

The share is what a buyer asks for first, and errors that one model and several have in common cancel in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from fineserve_evidence.validate.cases import SharedLoop
from fineserve_evidence.validate.predict import Predicted
from fineserve_sim.experiment.show.plot_style import house_style, look_at, save


class Share(NamedTuple):
    """The share of a GPU that the models of a label keep with so many requests on it, measured and predicted."""

    label: str
    requests: int
    measured: float
    predicted: float


def shares(found: Sequence[Predicted]) -> Iterator[Share]:
    """Compare every row of several models with the one of a single model that has as many requests and the same budget."""
    rows = [(one, one.case.load) for one in found if isinstance(one.case.load, SharedLoop)]
    alone = {
        (load.clients, one.case.serving.token_budget): one for one, load in rows if load.models == 1
    }  # by the requests on the GPU
    for one, load in rows:
        single = alone.get((load.models * load.clients, one.case.serving.token_budget))
        if load.models > 1 and single is not None:
            measured, predicted = (_per_s(one, at) / _per_s(single, at) for at in ("measured", "predicted"))
            yield Share(one.case.label.set.partition(", ")[2], load.models * load.clients, measured, predicted)


def _per_s(one: Predicted, at: str) -> float:
    values = one.throughput_per_s if at == "predicted" else one.case.throughput_per_s
    assert values is not None
    return float(values[0])


def _at_one_budget(found: Sequence[Predicted]) -> list[Predicted]:
    """The rows at the least token budget: shares hardly depend on it."""
    least = min((one.case.serving.token_budget for one in found), default=0)
    return [one for one in found if one.case.serving.token_budget == least]


def draw_shares(predictions: Mapping[str, Sequence[Predicted]], out: Path) -> list[Path]:
    """Write ``shares.png`` and ``.svg`` into ``out`` and return their paths; nothing where no set compares."""
    every = [share for found in predictions.values() for share in shares(_at_one_budget(found))]
    labels = list(dict.fromkeys(share.label for share in every))
    if not labels:
        return []
    out.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.subplots()
        places = sorted({share.requests for share in every})
        for place, label in enumerate(labels):
            mine = [share for share in every if share.label == label]
            x, look = [places.index(share.requests) for share in mine], look_at(place)
            axes.plot(
                x,
                [100 * share.measured for share in mine],
                **look | {"linestyle": "-"},
                label=f"{label.partition(', ')[0]}: measured",
            )
            dashed = look | {"linestyle": "--", "marker": ""}
            axes.plot(x, [100 * share.predicted for share in mine], **dashed, label="predicted")
        axes.set(xlabel="requests on the GPU", ylabel="of one model's output (%)", ylim=(0, 105))
        axes.set_xticks(range(len(places)), [str(place) for place in places])
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        return save(figure, out / "shares")
