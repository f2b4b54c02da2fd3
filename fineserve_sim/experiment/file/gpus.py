"""The GPUs of a file: each whole, or as the slices that MIG divides it into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from fineserve_sim import catalog
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster import Gpu
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import ConfigError, nearest
from fineserve_sim.experiment.file.messages import as_config_error
from fineserve_sim.systems import Sharing

T = TypeVar("T")


def gpus_of(document: Document, cluster: schema.Cluster) -> tuple[Gpu, ...]:
    """Numbered as policies, pinned placements and results have them: slices of a GPU one after another, each with a number."""
    spec = _gpu(document, cluster.gpu)
    found: list[Gpu] = []
    for board, sharing in enumerate(_sharing(document, cluster)):
        parts = [spec]
        if sharing is not None and sharing.profile is not None:
            parts = look_up(document, ("cluster", "sharing"), lambda: catalog.mig_slices(spec, str(sharing.profile)))  # noqa: B023
        for part in parts:
            node = board // cluster.gpus_per_node
            own = board if part.whole else None
            found.append(Gpu(len(found), node, part, cluster.network_bytes_per_s, sharing, own))
    return tuple(found)


def _sharing(document: Document, cluster: schema.Cluster) -> list[Sharing | None]:
    """Of each GPU of the cluster; None as the system has it."""
    if not isinstance(cluster.sharing, list):
        return [cluster.sharing] * cluster.count
    if len(cluster.sharing) != cluster.count:
        problem = f"has {len(cluster.sharing)} entries for {cluster.count} GPUs; give one for all, or one each"
        raise document.error(("cluster", "sharing"), problem)
    return list(cluster.sharing)


def look_up(document: Document, path: KeyPath, find: Callable[[], T]) -> T:
    try:
        return find()
    except ConfigError:
        raise
    except ValueError as problem:
        raise document.error(path, str(problem)) from None


def _gpu(document: Document, given: str | dict[str, Any]) -> GpuSpec:
    path: KeyPath = ("cluster", "gpu")
    if isinstance(given, str):
        return look_up(document, path, lambda: catalog.gpu(given))
    for key in given:
        if key not in GpuSpec.model_fields:
            raise document.error((*path, key), f"unknown key; {nearest(key, GpuSpec.model_fields)}")
    try:
        return GpuSpec.model_validate({"name": "inline", "efficiency": "roofline-scaled", "source": "inline"} | given)
    except ValidationError as problem:
        raise as_config_error(document, path, problem.errors()[0]) from None
