"""No module of ours imports, by whatever way round, one that imports it; core modules and functions stay short."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "fineserve_sim": ROOT,
    "fineserve_traces": ROOT / "traces",
    "fineserve_calibrate": ROOT / "calibrate",
    "fineserve_evidence": ROOT / "calibrate",
    "fineserve_runtime": ROOT / "runtime",
}


def modules(folder: Path, package: str) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    paths = {path.relative_to(folder).with_suffix(""): path for path in (folder / package).rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def imported(name: str, path: Path) -> Iterator[str]:
    """Every dotted name that a module imports, wherever in it: at the top, in a function, for the type checker alone."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module those that it imports; ``from package import name`` means the module ``name`` where there is one."""

    def module(dotted: str) -> str:
        return dotted if dotted in paths else dotted.rpartition(".")[0]

    return {
        name: {module(each) for each in imported(name, path)} & paths.keys() - {name} for name, path in paths.items()
    }


def ring(graph: Mapping[str, set[str]]) -> str:
    """One ring of imports in words; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as problem:
        return " imported by ".join(problem.args[1])
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_ring_of_imports(package: str) -> None:
    found = ring(imports(modules(PACKAGES[package], package)))
    assert not found, found


def test_no_ring_between_packages() -> None:
    """A package counts as one module here, so that no two of them need each other. The calibrator's command line counts by
    itself: it takes in the commands of evidence, which stands on the rest of the calibrator."""
    every = {name: path for package, folder in PACKAGES.items() for name, path in modules(folder, package).items()}

    def package(name: str) -> str:
        return name if name == "fineserve_calibrate.cli" else name.partition(".")[0]

    between: dict[str, set[str]] = {}
    for name, needed in imports(every).items():
        between.setdefault(package(name), set()).update({package(each) for each in needed} - {package(name)})
    assert "fineserve_evidence" in between["fineserve_calibrate.cli"]
    assert not ring(between)


@pytest.mark.parametrize(
    "hidden",
    ["from p.b import x", "def f():\n    import p.b", "if TYPE_CHECKING:\n    from p import b", "from . import b"],
)
def test_a_hidden_ring_is_named(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "a.py").write_text(hidden, encoding="utf-8")
    (tmp_path / "p" / "b.py").write_text("from p.a import y", encoding="utf-8")
    assert sorted(set(ring(imports(modules(tmp_path, "p"))).split(" imported by "))) == ["p.a", "p.b"]


@pytest.mark.parametrize("package", ["cluster", "policy"])
def test_functions_fit_on_a_screen_and_files_have_one_subject(package: str) -> None:
    """In the rooms that everything else is built on: at most 50 lines a function, 400 a file."""
    for path in sorted((ROOT / "fineserve_sim" / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= 50, f"{path}: {node.name} has {lines} lines"


def test_the_tests_kits_have_names_of_their_own() -> None:
    """A folder's kits are imported by their bare names, whichever folder was collected first."""
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.stem not in ("conftest", "__init__"))
    stems = Counter(path.stem for path in tests if not path.stem.startswith("test_"))
    assert [stem for stem, files in stems.items() if files > 1] == []
