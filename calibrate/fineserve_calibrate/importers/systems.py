"""Systems of ``aiconfigurator-core`` whose tables can be imported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SYSTEMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "h100_sxm": ("h100-sxm", "NVIDIA H100 80GB HBM3"),
        "h200_sxm": ("h200-sxm", "NVIDIA H200"),
        "a100_sxm": ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
    }
)
"""GPU of the catalog, and the name that its driver reports, by the package's name of the system."""
