"""Which build this is: modules compiled to C extensions (hatch_build.py), or all of them Python."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec


def build() -> str:
    """``compiled`` or ``pure Python``."""
    found = find_spec("fineserve_sim.policy.controller")
    return "compiled" if found and isinstance(found.loader, ExtensionFileLoader) else "pure Python"
