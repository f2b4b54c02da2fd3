"""What the documents say is true of the code: commands parse, links lead somewhere, tables name everything they promise to."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fineserve_sim.catalog import deployment, gpu, model, precisions
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.file.metric_names import METRICS, PERCENTILES
from fineserve_sim.latency import Provenance, StepModel

ROOT = Path(__file__).parents[1]
DOCS = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "traces" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
FOLDERS = ("", "fineserve_sim", "traces")
"""Where a path in a document may start."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_PATH = re.compile(r"`((?:[\w.*-]+/)+(?:[\w*-]+\.\w+)?)`")
PROGRAMS = {
    "fineserve-sim": "fineserve_sim.cli",
    "fineserve-calibrate": "fineserve_calibrate.cli",
    "fineserve-run": "fineserve_runtime.cli",
}
OURS = ("fineserve-", "python3 dev.py ")
OTHERS_OF_DEV = ("fineserve-test", "fineserve-compile", "fineserve-docs")
"""Commands of dev.py that start none of these."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(language: str) -> Iterator[tuple[str, str]]:
    """(document, body) of every code block in ``language``."""
    for path in DOCS:
        for found, body in FENCE.findall(path.read_text(encoding="utf-8")):
            if found == language:
                yield path.name, body


def commands() -> list[str]:
    """Every shell command of the documents, and those between backticks in their prose."""
    blocks = [line for _, body in fences("sh") for line in body.splitlines() if line.strip()]
    blocks += [line for _, body in fences("console") for line in body.splitlines() if line.startswith(OURS)]
    prose = [FENCE.sub("", path.read_text(encoding="utf-8")) for path in DOCS]
    inline = [found for each in prose for found in re.findall(r"`((?:python3 dev\.py|fineserve-sim) [^`]+)`", each)]
    return list(dict.fromkeys(line for line in [*blocks, *inline, *examples()] if "FILE" not in line))


def examples() -> Iterator[str]:
    """The examples at the end of each command's help."""
    for module in PROGRAMS.values():
        left: list[Any] = [typer.main.get_command(importlib.import_module(module).app)]
        while left:
            command = left.pop()
            left += getattr(command, "commands", {}).values()
            yield from (line for line in (command.epilog or "").splitlines() if line.startswith(OURS))


def parse(arguments: list[str], program: str = "fineserve-sim") -> None:
    """Parse ``arguments`` as the program does, and run nothing. Raises what the program would report."""
    group: Any = typer.main.get_command(importlib.import_module(PROGRAMS[program]).app)

    def disarm(command: Any) -> None:
        command.callback = lambda **_: None
        for each in getattr(command, "commands", {}).values():
            disarm(each)

    disarm(group)
    group.main(args=arguments, prog_name=program, standalone_mode=False)


def through_dev(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Which command of dev.py gets which arguments."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    dev = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dev)
    seen: list[tuple[str, list[str]]] = []

    def record(command: str, rest: list[str]) -> int:
        seen.append((command, rest))
        return 0

    monkeypatch.setattr(dev, "simulate", partial(record, "sim"))
    monkeypatch.setattr(dev, "test", partial(record, "test"))
    monkeypatch.setattr(dev, "compile_modules", partial(record, "compile"))
    monkeypatch.setattr(dev, "docs", partial(record, "docs"))
    monkeypatch.setattr(dev, "serve", partial(record, "run"))
    monkeypatch.setattr(dev, "calibrate", partial(record, "calibrate"))
    monkeypatch.setattr(sys, "argv", ["dev.py", *arguments])
    assert dev.main() == 0
    return seen[0]


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(line.partition(" > ")[0], comments=True)
    if (program, words[0]) == ("python3", "dev.py"):
        command, words = through_dev(words[1:], monkeypatch)
        program = f"fineserve-{command}"
    if not words:
        return
    if program not in PROGRAMS:
        assert (program, words) == ("pip", ["install", "."]) or program in OTHERS_OF_DEV
        assert all((ROOT / word).exists() for word in words if "/" in word)
        return
    parse(words, program)
    for file in (word for word in words if word.endswith((".yaml", ".csv"))):
        assert "/" not in file or (ROOT / file).exists()
    overrides = [tuple(value.split("=", 1)) for flag, value in pairwise(words) if flag == "--set"]
    if words[0] == "run" and "/" in words[1]:
        load_experiment(ROOT / words[1], overrides, quick="--quick" in words)  # type: ignore[arg-type]


def test_there_are_commands_and_wrong_ones_are_noticed() -> None:
    assert len(commands()) > 10
    for wrong in (["rum"], ["run"], ["run", "a.yaml", "--jobs", "many"], ["run", "a.yaml", "--colour"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing|valid integer"):
            parse(wrong)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist(path: Path) -> None:
    body = path.read_text(encoding="utf-8")
    for target in LINK.findall(body):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), f"{target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    tops = {entry.name for folder in FOLDERS for entry in (ROOT / folder).iterdir()}
    for named in CODE_PATH.findall(body):
        if named.split("/")[0] in tops - {"results"}:
            assert any(list((ROOT / folder).glob(named.rstrip("/"))) for folder in FOLDERS), f"{named} does not exist"


def test_every_figure_is_shown() -> None:
    shown = {Path(target).name for path in DOCS for target in LINK.findall(path.read_text(encoding="utf-8"))}
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir()} <= shown


def whole_files() -> list[Any]:
    """Examples of pages whose commands are not run; tests/test_site.py runs those of the others."""
    run = {path.name for path in (ROOT / "docs" / "howto").iterdir()}
    found = [(name, body) for name, body in fences("yaml") if body.startswith("fineserve: 1") and name not in run]
    return [pytest.param(body, id=f"{name}-{index}") for index, (name, body) in enumerate(found)]


@pytest.mark.parametrize("body", whole_files())
def test_yaml_examples_load(body: str, tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(body, encoding="utf-8")
    assert load_experiment(file).points


def test_every_system_shown_as_yaml_fits_fig10(tmp_path: Path) -> None:
    variants = [
        item for _, body in fences("yaml") if body.startswith(("- base:", "- {base:")) for item in yaml.safe_load(body)
    ]
    assert variants
    load_experiment(ROOT / "experiments" / "fig10.yaml", [("systems", json.dumps(variants)), ("claims", "[]")])


def assumed() -> list[Provenance]:
    """All assumed and fitted numbers of the H100's latency model."""
    found: dict[Provenance, None] = {}
    for deployed in map(deployment, ("vllm-0.9.1-authors", "vllm-cudagraph")):
        for precision in precisions().values():
            if deployed.host_floors is None or precision.name in deployed.host_floors:
                for tp in (1, 2):
                    step = StepModel(model("llama-3.1-8b"), precision, tp, gpu("h100-sxm"), deployed)
                    found |= dict.fromkeys(line for line in step.provenance() if line.kind in ("assumed", "fitted"))
    return list(found)


@pytest.mark.parametrize("line", assumed(), ids=lambda line: f"{line.quantity}={line.value:g}")
def test_every_assumed_number_is_in_the_table(line: Provenance) -> None:
    rows = [row for row in text("docs/reference/assumptions.md").splitlines() if f"`{line.quantity}`" in row]
    assert any(f"| {line.value:g} {line.unit} |" in row for row in rows)


def test_every_metric_is_defined() -> None:
    page = text("docs/experiments.md")
    for metric in METRICS:
        assert f"`{re.sub(r'_p[0-9.]+_', '_pN_', metric)}`" in page
    assert all(f"{percent:g}" in page for percent in PERCENTILES)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_claims_of_experiments_are_written_up(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    pages = (ROOT / "docs" / "reproduction").glob("*.md")
    claims = "".join([text("docs/reproduction.md"), *(page.read_text(encoding="utf-8") for page in pages)])
    for claim in data.get("claims", []):
        assert f"| {claim['id']}" in claims
    assert path.name in claims


def test_the_notice_names_the_origin_of_all_embedded_data() -> None:
    notice = text("NOTICE")
    for path in sorted((ROOT / "traces" / "fineserve_traces" / "data").glob("*.json")):
        sketch = json.loads(path.read_text(encoding="utf-8"))
        repository, commit = re.match(r"github\.com/(\S+) .* @ (\w+)", sketch["upstream"]).groups()  # type: ignore[union-attr]
        assert re.search(rf"{sketch['name']} +{repository} @ {commit}, {sketch['licence']}", notice)
    for source in ("aiconfigurator-core 0.12.0", "aiconfigurator 0.5.0", "microsoft/vidur", "llm-fineserve/FineServe"):
        assert source in notice


def test_the_changelog_has_this_version() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert f"## [{version}]" in text("CHANGELOG.md")
