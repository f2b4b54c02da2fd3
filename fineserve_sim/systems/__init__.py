"""Every system of the papers, and what the papers leave open, as data.

A system is one declarative file, found by its name. Policies have options where a paper can be read in several ways;
``readings.yaml`` lists them all, with the values to try.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field

from fineserve_sim.packaged import read_yaml
from fineserve_sim.systems.sharing import Sharing
from fineserve_sim.systems.spec import Spec, SystemSpec

__all__ = ["OpenReading", "Sharing", "SystemSpec", "load_systems", "open_readings"]

_READINGS = "readings.yaml"


class OpenReading(Spec):
    """An option that a paper leaves open: its name as ``axis.policy.option``, and values to try, the default first.

    ``also``: options of other policies that are read alike, since the same sentence speaks of them. They have values of the
    same names, and the systems that the paper compares have the first one.
    """

    option: str
    also: tuple[str, ...] = ()
    values: Annotated[tuple[Any, ...], Field(min_length=2)]
    paper: str
    where: str
    says: str


@cache
def load_systems() -> dict[str, SystemSpec]:
    """All built-in systems by name, in alphabetical order."""
    here = (file for file in files(__name__).iterdir() if file.name.endswith(".yaml") and file.name != _READINGS)
    systems = [SystemSpec.model_validate(read_yaml(file)) for file in sorted(here, key=lambda file: file.name)]
    return {system.name: system for system in systems}


@cache
def open_readings() -> tuple[OpenReading, ...]:
    """All open readings, axis by axis."""
    return tuple(OpenReading.model_validate(reading) for reading in read_yaml(files(__name__) / _READINGS))
