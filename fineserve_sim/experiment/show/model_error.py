"""The error of the model itself, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fineserve_sim.catalog.model_errors import model_errors


def error_text(told: Mapping[str, Any]) -> str:
    """The class of an answer's step times in a sentence, from its JSON."""
    error = told["error"]
    tables = {"measured": "the GPU's own tables", "scaled": "tables of another GPU, scaled, or rooflines"}
    engines = {"shared": "of engines that share a GPU", "alone": "of engines alone on their GPUs"}
    layers = "of mixtures of experts" if error["layers"] == "experts" else ""
    where = [
        layers,
        engines.get(error["sharing"], ""),
        f"by {tables[error['tables']]}" if error["tables"] in tables else "",
    ]
    return (
        f"Model's error: steps {' '.join(filter(None, where))} took {error['low']:.2f} to {error['high']:.2f} times as long as "
        f"predicted in {100 * model_errors().level:.0f} % of {error['rows']:,} rows of {error['sets']} measured sets."
    )
