"""The policy core imports with nothing but the standard library at hand."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
blocked = "simpy numpy scipy torch vllm pandas pyarrow pydantic yaml matplotlib typer rich"
for name in blocked.split():
    sys.modules[name] = None
try:
    import numpy
except ImportError:
    pass
else:
    raise SystemExit("the block does not block")
before = set(sys.modules)
import importlib, pkgutil
import fineserve_sim.policy as core
names = [module.name for module in pkgutil.walk_packages(core.__path__, core.__name__ + ".")]
for name in names:
    importlib.import_module(name)
foreign = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"fineserve_sim"}
others = {name for name in sys.modules if name.startswith("fineserve_sim.") and not name.startswith("fineserve_sim.policy")}
print(len(names), sorted(foreign | others))
"""


def test_every_module_imports_without_third_parties() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    modules, _, foreign = run.stdout.strip().partition(" ")
    assert int(modules) >= 14
    assert foreign == "[]"
