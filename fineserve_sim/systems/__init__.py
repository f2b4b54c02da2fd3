"""Every system of the papers: one declarative file each, found by its name."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fineserve_sim.packaged import read_yaml
from fineserve_sim.systems.sharing import Sharing
from fineserve_sim.systems.spec import SystemSpec

__all__ = ["Sharing", "SystemSpec", "load_systems"]


@cache
def load_systems() -> dict[str, SystemSpec]:
    """All built-in systems by name, in alphabetical order."""
    entries = sorted((f for f in files(__name__).iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    systems = [SystemSpec.model_validate(read_yaml(f)) for f in entries]
    return {system.name: system for system in systems}
