"""How far the model's predictions are off, by the class of what is predicted: bands learnt from measured sets.

``model_errors.yaml`` is written by ``python -m docs.generate --measure DIR`` (``fineserve_evidence.validate.bands`` has the
rules); docs/reference/scorecard.md says how the bands do on sets that they were not learnt from.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fineserve_sim.catalog.specs import Spec
from fineserve_sim.packaged import read_yaml

ANY = "any"
"""In place of a part of a class: it is wider than that."""


class Predictable(NamedTuple):
    """The class of a prediction.

    * ``moment``: ttft or tpot
    * ``tables``: measured, the GPU's own; or scaled, another GPU's
    * ``engine``: vllm or other
    * ``sharing``: alone or shared, the engines on a GPU
    * ``load``: below or above saturation
    * ``layers``: dense, or experts
    """

    moment: str
    tables: str = ANY
    engine: str = ANY
    sharing: str = ANY
    load: str = ANY
    layers: str = ANY


class ErrorClass(Spec):
    """The band of a class.

    ``low`` and ``high`` are ends of measured / predicted. ``median`` is the median absolute error of its rows.
    """

    of: Predictable
    sets: int
    rows: int
    median: float
    low: float
    high: float


class ModelErrors(Spec):
    """All bands, what share of the rows each is to hold, and where they come from."""

    source: str
    level: float
    classes: tuple[ErrorClass, ...]


WIDER: tuple[dict[str, str], ...] = (
    {},
    {"load": ANY},
    {"tables": ANY},
    {"tables": ANY, "load": ANY},
    {"tables": ANY, "load": ANY, "layers": ANY},
    {"tables": ANY, "engine": ANY, "sharing": ANY, "load": ANY, "layers": ANY},
)
"""From a class to wider ones, the nearest first."""


def wider(of: Predictable) -> list[Predictable]:
    """The class itself, then wider ones that speak for it where it has too few sets."""
    return list(dict.fromkeys(of._replace(**changed) for changed in WIDER))


@cache
def model_errors() -> ModelErrors:
    """The bands that ship."""
    return ModelErrors.model_validate(read_yaml(files("fineserve_sim.catalog").joinpath("model_errors.yaml")))


def model_error(of: Predictable) -> ErrorClass:
    """The nearest class that has a band; the widest always has one."""
    known = {each.of: each for each in model_errors().classes}
    return next(known[each] for each in wider(of) if each in known)
