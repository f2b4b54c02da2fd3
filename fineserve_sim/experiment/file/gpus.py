"""The GPUs of a file: each whole, or as the slices that MIG divides it into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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


@dataclass(frozen=True, slots=True)
class Bought:
    """GPUs of one kind, whole. ``usd_per_gpu_hour``: as the file says, or None."""

    gpu: str
    count: int
    usd_per_gpu_hour: float | None


class _Card(NamedTuple):
    """A GPU that is bought, and what it is to models: itself, or its slices."""

    node: int
    parts: Sequence[GpuSpec]
    sharing: Sharing | None


def gpus_of(document: Document, cluster: schema.Cluster | schema.MixedCluster) -> tuple[Gpu, ...]:
    """Numbered as policies, pinned placements and results have them: slices of a GPU one after another, each with a number."""
    cards = _mixed if isinstance(cluster, schema.MixedCluster) else _alike
    found: list[Gpu] = []
    for board, card in enumerate(cards(document, cluster)):  # type: ignore[arg-type]
        for part in card.parts:
            own = board if part.whole else None
            found.append(Gpu(len(found), card.node, part, cluster.network_bytes_per_s, card.sharing, own))
    return tuple(found)


def bought(document: Document, cluster: schema.Cluster | schema.MixedCluster) -> tuple[Bought, ...]:
    """The GPUs bought of each kind, in the order of the file."""
    if isinstance(cluster, schema.Cluster):
        return (Bought(_gpu(document, ("cluster", "gpu"), cluster.gpu).name, cluster.count, cluster.usd_per_gpu_hour),)
    found: dict[tuple[str, float | None], int] = {}
    for index, node in enumerate(cluster.nodes):
        kind = _gpu(document, ("cluster", "nodes", index, "gpu"), node.gpu).name, node.usd_per_gpu_hour
        found[kind] = found.get(kind, 0) + node.count
    return tuple(Bought(name, count, usd) for (name, usd), count in found.items())


def _alike(document: Document, cluster: schema.Cluster) -> Iterator[_Card]:
    spec = _gpu(document, ("cluster", "gpu"), cluster.gpu)
    for board, sharing in enumerate(_sharing(document, cluster)):
        yield _card(document, ("cluster", "sharing"), board // cluster.gpus_per_node, spec, sharing)


def _mixed(document: Document, cluster: schema.MixedCluster) -> Iterator[_Card]:
    first = 0
    for index, entry in enumerate(cluster.nodes):
        path: KeyPath = ("cluster", "nodes", index)
        spec = _gpu(document, (*path, "gpu"), entry.gpu)
        for number in range(entry.count):
            node = first + number // cluster.gpus_per_node
            if entry.mig is None:
                yield _card(document, (*path, "sharing"), node, spec, entry.sharing)
            elif entry.sharing is not None and entry.sharing.profile is not None:
                raise document.error(
                    (*path, "sharing"), "divides the GPU by MIG, and mig does so, too; give one of them"
                )
            else:
                parts = look_up(document, (*path, "mig"), lambda: catalog.mig_parts(spec, entry.mig or ()))  # noqa: B023
                yield _Card(node, parts, entry.sharing)
        first += -(-entry.count // cluster.gpus_per_node)


def _card(document: Document, path: KeyPath, node: int, spec: GpuSpec, sharing: Sharing | None) -> _Card:
    if sharing is None or sharing.profile is None:
        return _Card(node, [spec], sharing)
    return _Card(node, look_up(document, path, lambda: catalog.mig_slices(spec, str(sharing.profile))), sharing)


def _sharing(document: Document, cluster: schema.Cluster) -> list[Sharing | None]:
    """The sharing of each GPU of the cluster; None: the system's own."""
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


def _gpu(document: Document, path: KeyPath, given: str | dict[str, Any]) -> GpuSpec:
    if isinstance(given, str):
        return look_up(document, path, lambda: catalog.gpu(given))
    for key in given:
        if key not in GpuSpec.model_fields:
            raise document.error((*path, key), f"unknown key; {nearest(key, GpuSpec.model_fields)}")
    try:
        return GpuSpec.model_validate({"name": "inline", "efficiency": "roofline-scaled", "source": "inline"} | given)
    except ValidationError as problem:
        raise as_config_error(document, path, problem.errors()[0]) from None
