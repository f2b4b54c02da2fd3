"""Which GPU is there, and whether it is the one that was asked for.

The driver library answers without torch: a machine without a GPU gets its answer at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fineserve_calibrate.probes.backend import ProbeError
from fineserve_calibrate.probes.libcuda import DriverError, load
from fineserve_sim.catalog import GpuSpec, gpu

NAMES: tuple[tuple[str, str], ...] = (
    ("h100-sxm", r"\bH100 80GB HBM3\b"),
    ("h100-pcie", r"\bH100 PCIe\b"),
    ("h200-sxm", r"\bH200\b"),
    ("h800", r"\bH800\b"),
    ("a100-80gb", r"\bA100\b.*\b80GB\b"),
    ("a800", r"\bA800\b"),
    ("l40s", r"\bL40S\b"),
    ("b200", r"\bB200\b"),
)
"""Catalog GPU, and a pattern of the name that its driver reports."""
FAMILIES = tuple(dict.fromkeys(name.split("-")[0] for name, _ in NAMES))


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """The first GPU: the driver's name for it, the CUDA version that the driver speaks, its data sheet if known."""

    device: str
    driver: str
    spec: GpuSpec | None


def catalog_name(device: str) -> str | None:
    """The catalog's GPU for the name that a driver reports."""
    return next((name for name, pattern in NAMES if re.search(pattern, device)), None)


def check_wanted(wanted: str) -> None:
    """Raise ProbeError unless ``wanted`` is ``auto``, ``cpu``, a catalog GPU or a family of them (h100)."""
    known = ("auto", "cpu", *FAMILIES, *(name for name, _ in NAMES if name not in FAMILIES))
    if wanted not in known:
        raise ProbeError(f"--gpu {wanted}: unknown; choose one of {', '.join(known)}")


def find_gpu(wanted: str) -> FoundGpu:
    """The GPU of this machine. Raises ProbeError when there is none, or another one than ``wanted``."""
    try:
        driver = load()
        device, version = driver.device_name(0), driver.version()
    except DriverError as error:
        raise ProbeError(
            f"--gpu {wanted}: no GPU was found on this machine ({error}); --gpu cpu measures the processor instead"
        ) from None
    name = catalog_name(device)
    if wanted not in ("auto", name, name.split("-")[0] if name else name):
        raise ProbeError(f"--gpu {wanted}: this machine has a {device}; name that one, or give --gpu auto")
    return FoundGpu(device, f"CUDA {version}", gpu(name) if name else None)
