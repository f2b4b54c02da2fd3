"""The clusters that a search tries: every type of GPU with every TP degree, each with its price."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fineserve_sim import catalog
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.schema import MixedCluster
from fineserve_sim.experiment.sizing.probe import Attained, Prober, SizingError, named
from fineserve_sim.experiment.sizing.search import Answer, Axis, runnable, size


@dataclass(frozen=True, slots=True)
class Variant:
    """A type of GPU (None: the file's), a TP degree for every model (None: the file's), dollars a GPU-hour (None: the file's,
    or the catalog's)."""

    gpu: str | None = None
    tp: int | None = None
    usd_per_gpu_hour: float | None = None

    def of(self, prober: Prober) -> Prober:
        """The prober of this cluster. A file's own price holds for its own GPU alone."""
        file = prober.file()
        overrides = [*prober.overrides]
        if self.gpu is not None and isinstance(file.file.cluster, MixedCluster):
            mixed = file.file.cluster
            links = {"gpus_per_node": mixed.gpus_per_node, "network_bytes_per_s": mixed.network_bytes_per_s}
            overrides.append(("cluster", json.dumps({"gpu": self.gpu, "count": mixed.count} | links)))
        elif self.gpu is not None:
            overrides += [("cluster.gpu", self.gpu), ("cluster.usd_per_gpu_hour", "null")]
        if self.usd_per_gpu_hour is not None:
            overrides.append(("cluster.usd_per_gpu_hour", str(self.usd_per_gpu_hour)))
        if self.tp is not None:
            overrides += [(f"models.{index}.tp", str(self.tp)) for index in range(len(file.file.models))]
        name = ", ".join(part for part in (self.gpu, self.tp and f"TP {self.tp}") if part)
        return replace(prober, overrides=overrides, told=named(prober.told, name))


def variants(gpus: Sequence[str], degrees: Sequence[int], prices: Mapping[str, float]) -> list[Variant]:
    """Every GPU with every degree; ``prices`` by GPU, ``""`` for all others. Raises SizingError for a GPU that is unknown or
    given twice."""
    for at, gpu in enumerate(gpus):
        catalog.gpu(gpu)
        if gpu in gpus[:at]:
            raise SizingError(f"--gpu {gpu}: given twice")
    if unused := [gpu for gpu in prices if gpu and gpu not in gpus]:
        raise SizingError(f"--price {unused[0]}: no --gpu {unused[0]} is searched")
    return [
        Variant(gpu, tp, prices.get(gpu or "", prices.get("")))
        for gpu in gpus or [None]  # type: ignore[list-item]
        for tp in degrees or [None]  # type: ignore[list-item]
    ]


def size_all(
    prober: Prober, tried: Sequence[Variant], axis: Axis, *, most_gpus: int | None, precision: float
) -> Iterator[tuple[Answer, Prober]]:
    """The answers of every variant, each with the prober that found it. One of several that cannot be (a GPU without the
    tensor cores of a precision, say) is an answer of none with its reason. Errors as of ``size``."""
    for variant in tried:
        own = variant.of(prober)
        try:
            own.file()
        except ConfigError as problem:
            if len(tried) == 1:
                raise
            yield from ((answer, own) for answer in _impossible(prober, variant, problem))
            continue
        for answer in size(own, axis, most_gpus=most_gpus, precision=precision):
            yield replace(answer, tp=variant.tp), own


def _impossible(prober: Prober, variant: Variant, problem: ConfigError) -> Iterator[Answer]:
    setup = prober.file().setup
    probe = Attained(0.0, False, {}, None, 0, True, problem.problem)
    for name in runnable(prober.file()):
        yield Answer(name, setup.systems[name].title, None, (probe,), variant.gpu or setup.gpu_name, variant.tp)
