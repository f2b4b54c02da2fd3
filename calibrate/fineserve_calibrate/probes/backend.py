"""What a device must offer to be probed.

Three devices do: ``TorchBackend`` on CUDA and on the CPU, and the simulated one of ``simulated`` (tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fineserve_calibrate.probes.schema import Point
from fineserve_sim.catalog import GpuSpec


class ProbeError(ValueError):
    """Probing cannot start or go on; the text is one line: what was wrong, where, what would be right."""


class Unavailable(Exception):
    """This point cannot be measured here; the text is the reason, for the report."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a measurement depends on. Finished parts are kept while it stays the same.

    ``device`` is the name that the driver reports, ``gpus`` how many there are; ``vllm`` is ``none`` where it is missing.
    """

    device: str
    gpus: int
    driver: str
    cuda: str
    torch: str
    vllm: str


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A point that is ready to run: ``sample(n)`` measures it n times and returns n positive seconds."""

    sample: Callable[[int], list[float]]
    implementation: str
    close: Callable[[], None] = _nothing


class Backend(Protocol):
    """A device under test."""

    identity: Identity
    spec: GpuSpec | None
    """Its data sheet; None for a device that the catalog does not have."""

    def prepare(self, operator: str, point: Point) -> Prepared:
        """Allocate what the point needs. Raises Unavailable, or whatever the libraries raise."""

    def now_s(self) -> float:
        """A clock that only grows."""

    def clocks(self) -> str:
        """Clock rates seen now, in words."""

    def healthy(self) -> bool:
        """Whether the device still works after an error."""

    def close(self) -> None:
        """Give back processes and memory that points shared; probing is over."""
