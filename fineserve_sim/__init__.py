"""Simulate and compare policies for serving many mixed-precision language models on shared GPUs.

``run``, ``compare``, ``size``, ``plan`` and ``read`` are the program as functions (docs/python.md). They are looked up when
first asked for, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Plan", "Result", "Sizing", "__version__", "compare", "plan", "read", "run", "size"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fineserve_sim.api"), name)
