"""The policy core imports with nothing but the standard library at hand, and knows no future."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for top in ("fineserve_sim", "runtime/fineserve_runtime") for path in (ROOT / top).rglob("*.py")]

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
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    modules, _, foreign = run.stdout.strip().partition(" ")
    assert int(modules) >= 14
    assert foreign == "[]"


def identifiers(path: Path) -> Iterator[str]:
    """Names that a module binds, reads or imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        for attribute in ("name", "id", "attr", "arg"):
            if isinstance(found := getattr(node, attribute, None), str):
                yield found


def test_no_policy_has_a_word_for_output_lengths() -> None:
    core = [path for path in SOURCES if path.is_relative_to(ROOT / "fineserve_sim" / "policy")]
    named = {name for path in core for name in identifiers(path)}
    assert "prompt_tokens" in named
    assert not [name for name in named if "output" in name]
