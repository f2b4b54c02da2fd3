"""The simplifications of a model: a line for the answer, so that no approximation passes for a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fineserve_sim.catalog import ModelSpec


def simplified(models: Iterable[tuple[str, ModelSpec]]) -> Iterator[str]:
    """One line for each simplification, with the ids of the models that it is about; none for dense models."""
    found: dict[str, list[str]] = {}
    for id, spec in models:
        for line in _of(spec):
            found.setdefault(line, []).append(id)
    for line, ids in found.items():
        yield f"{', '.join(ids)}: {line}"


def _of(spec: ModelSpec) -> Iterator[str]:
    if spec.experts is not None:
        yield "routing among experts is random with a mild skew, the same for every prompt"
    if spec.window is not None or spec.linear is not None:
        yield "KV of a sequence that does not grow evenly (windows, states) counts at the mean length of the requests"
    if spec.latent is not None and spec.latent.index_tokens:
        yield "sparse attention by roofline: no table was measured"
    if spec.other_parameters:
        yield "weights of its vision tower count; only text is served"
