"""The build hook that compiles: with FINESERVE_COMPILE=1 a wheel holds the modules in which simulations spend their time as C
extensions, too, which mypyc makes of the very same sources. Without it a wheel is Python alone.

    FINESERVE_COMPILE=1 pip install .          needs a C compiler and a CPU minute

Which modules those are is data: ``tool.hatch.build.targets.wheel.hooks.custom`` of pyproject.toml.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "FINESERVE_COMPILE"


class CompiledModules(BuildHookInterface[Any]):
    """Adds extensions to a wheel that is to be installed; editable installs stay as they are."""

    def dependencies(self) -> list[str]:
        """mypyc reads the types of everything that the modules import."""
        if not _wanted() or self.target_name != "wheel":
            return []
        return [*self.metadata.core.dependencies, *self.config["requires"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if _wanted() and self.target_name == "wheel" and version != "editable":
            build_data.update(pure_python=False, infer_tag=True)
            build_data["force_include"] |= self._extensions(Path(self.root) / "build" / "mypyc")

    def _extensions(self, folder: Path) -> dict[str, str]:
        """Compile into ``folder``. Returns each extension's path there and in the wheel."""
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext

        modules = mypycify(
            self._modules(),
            target_dir=str(folder / "c"),
            group_name="fineserve_sim",
            opt_level="1",  # as fast as 3, and compiled in a third of the time
            debug_level="0",
        )
        command = build_ext(Distribution({"ext_modules": modules}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
        command.ensure_finalized()
        command.run()
        return {path: os.path.relpath(path, command.build_lib) for path in command.get_outputs()}

    def _modules(self) -> list[str]:
        root = Path(self.root)
        found = {path for pattern in self.config["compile"] for path in root.glob(pattern)}
        left_out = {path for pattern in self.config["leave"] for path in root.glob(pattern)}
        return sorted(path.relative_to(root).as_posix() for path in found - left_out)


def _wanted() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")
