"""The sources of policies from outside, which are part of the key of their runs as ours are."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def sources_digest(*names: str) -> str:
    """Hash of the modules ``names`` and of all modules loaded from the same folders or packages: a policy may import parts of
    itself. Where a module has no file (a notebook's cell), no other process gets the same hash."""
    own = [sys.modules[name] for name in names if not _is_known(name)]
    digest = hashlib.sha256()
    for module in own:
        if getattr(module, "__file__", None) is None:
            return os.urandom(32).hex()
        folder = _folder(module)
        for path in sorted(set(_loaded_below(folder))):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_known(name: str) -> bool:
    """Whether a module is Python's or ours: neither changes with a policy from outside."""
    top = name.partition(".")[0]
    return top != "__main__" and (top in sys.stdlib_module_names or top.startswith("fineserve_"))


def _folder(module: ModuleType) -> Path:
    """The folder of a module, or of the package that it is a part of."""
    levels = (module.__package__ or "").count(".")
    return Path(str(module.__file__)).resolve().parents[levels]


def _loaded_below(folder: Path) -> Iterator[Path]:
    """The files of loaded modules, installed libraries left out."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and not _is_known(name):
            path = Path(file).resolve()
            if path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts and path.is_file():
                yield path
