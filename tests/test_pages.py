"""Every command of every page is run, in small: what a reader copies works, whether the page shows its output or not.

Experiments of papers are cut to their first point and few requests, searches to few steps; all else is run as it stands there.
Commands that need a GPU, vLLM or minutes of building are parsed alone (test_docs.py).
"""

from __future__ import annotations

import gzip
import importlib
import json
import shlex
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from docs.generate.shown import FENCE, FILE
from fineserve_sim.experiment import load_experiment, run_loaded

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = {"fineserve-sim": "fineserve_sim.cli", "fineserve-calibrate": "fineserve_calibrate.cli"}
BUILDS = (
    ["pip", "install"],
    ["python3", "dev.py", "test"],
    ["python3", "dev.py", "compile"],
    ["python3", "dev.py", "docs"],
)
REQUESTS, SLOW = 20, 0.05
"""Requests of a run; the rate scale where phases say how many there are."""
SMALL = (("claims", "[]"), ("figures", "[]"), ("answer", "null"), ("seeds", "1"))


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page's shell fences, without what is built."""
    lines = [
        line
        for language, body in FENCE.findall(page.read_text(encoding="utf-8"))
        if language == "sh"
        for line in body.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    lines = [line.replace("python3 dev.py sim ", "fineserve-sim ", 1) for line in lines]
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    return [each for each in words if not any(each[: len(build)] == build for build in BUILDS)]


def short(words: list[str]) -> list[str]:
    """The same command with less to do."""
    name, *rest = words
    if name == "plan":
        return [*_without(words, "--seconds"), "--evaluations", "5"]
    if name == "reproduce":
        kept = _without(words, "--paper", "--claims", "--jobs")
        return [*kept, "--claims", "KS-2-token", "--experiments", str(ROOT / "experiments")]
    if name == "explain":
        return [name, rest[0], "3"]
    if name == "size" and rest[0].startswith("experiments/"):
        found = [
            name,
            str(ROOT / rest[0]),
            *(word for word in rest[1:] if word != "--quick"),
            "--quick",
            "--precision",
            "1",
        ]
        return [*_without(found, "--most-gpus"), "--most-gpus", "4", "--seeds", "1"]
    return words


def _without(words: list[str], *options: str) -> list[str]:
    """The words without these options and their values."""
    at = [place for place, word in enumerate(words) if word in options]
    return [word for place, word in enumerate(words) if place not in at and place - 1 not in at]


def run_small(words: list[str]) -> None:
    """``run`` of an experiment of a paper: its first point, with few requests where the file counts them."""
    path, pairs = ROOT / words[1], [tuple(text.split("=", 1)) for option, text in pairwise(words) if option == "--set"]
    given = load_experiment(path, [*pairs, *SMALL])  # type: ignore[list-item]
    if given.file.quick:
        given = load_experiment(path, [*pairs, *SMALL], quick=True)  # type: ignore[list-item]
    requests = given.setup.workload.requests
    if requests is not None and requests > REQUESTS:
        fewer = [("workload.requests", str(REQUESTS)), ("workload.warmup_requests", "0")]
        given = load_experiment(path, [*pairs, *SMALL, *fewer])  # type: ignore[list-item]
    (name, points), *_ = given.sweeps.items()
    out = next(
        (Path(text) for option, text in pairwise(words) if option in ("--out", "-o")), Path("results") / path.stem
    )
    first = points[0] if requests is not None else replace(points[0], rate_scale=SLOW)
    run_loaded(replace(given, sweeps={name: (first,)}), out, jobs=1, decisions=True)


def call(program: str, words: list[str]) -> None:
    """Run a command as its console script does; it must end well."""
    with mock.patch.object(sys, "argv", [program, *words]):
        try:
            importlib.import_module(PROGRAMS[program]).main()
        except SystemExit as left:
            assert not left.code, f"{program} {shlex.join(words)}"


def trace(*models: str) -> str:
    """A trace of these models in turns."""
    rows = [f"{0.2 * number:.1f},{models[number % len(models)]},300,20" for number in range(30)]
    return "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows, ""])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader works: traces and logs of his own, an experiment, and results of earlier runs."""
    monkeypatch.chdir(tmp_path)
    for variable in ("FORCE_COLOR", "COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "azure2023_conv.csv.gz").write_bytes(gzip.compress(trace("chat", "code").encode()))
    (tmp_path / "two_models.yaml").write_text(_file("docs/tutorial.md", "two_models.yaml"), encoding="utf-8")
    (tmp_path / "log.csv").write_text("when;sent;got\n1000;10;5\n2000;12;6\n", encoding="utf-8")
    log = [
        {"created": 1_700_000_000 + at, "model": "chat", "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
        for at in (0, 1)
    ]
    lines = [{"timestamp": 1000 * at, "input_length": 9, "output_length": 4, "hash_ids": [1]} for at in (0, 1)]
    for name, entries in (("access_log.jsonl", log), ("mooncake.jsonl", lines)):
        (tmp_path / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    turns = [{"from": "human", "value": "What is a slab?"}, {"from": "gpt", "value": "A run of blocks."}]
    (tmp_path / "sharegpt.json").write_text(json.dumps(2 * [{"id": "a", "conversations": turns}]), encoding="utf-8")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "reproduction.md", tmp_path / "docs")
    for name in ("fig10", "fig13", "before", "after", "late", "two_models"):
        run_small(["run", "experiments/fig13.yaml", "--out", f"results/{name}"])
    return tmp_path


def _file(page: str, name: str) -> str:
    found = dict(FILE.findall((ROOT / page).read_text(encoding="utf-8")))
    return found[name]


def write(files: dict[str, str], folder: Path) -> None:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")


def run_page(page: Path, folder: Path) -> int:
    """Run all commands of a page in the folder; how many. The page's files are there again for each."""
    found = commands(page)
    text = trace("A", "B") if any("A=" in word for words in found for word in words) else trace("chat", "code")
    files = {"trace.csv": text, "tomorrow.csv": text} | dict(FILE.findall(page.read_text(encoding="utf-8")))
    write(files, folder)
    if any("plan.yaml" in words for words in found):
        models = ["--model", "chat=llama-3.1-8b:fp8", "--model", "code=llama-3.1-8b:fp8"]
        wish = ["--gpus", "1", "--ttft-slo", "5", "--evaluations", "5"]
        call("fineserve-sim", ["plan", "azure2023_conv.csv.gz", *models, *wish, "--out", "."])
    for program, *words in found if page.name != "troubleshooting.md" else ():  # whose commands fail, as it shows
        write(files, folder)
        if words[:2] == ["traces", "convert"]:
            Path(words[words.index("--out") + 1]).unlink(missing_ok=True)
        if words[0] == "run" and words[1].startswith("experiments/"):
            run_small(words)
        else:
            call(program, [str(ROOT / word) if word.startswith("calibrate/") else word for word in short(words)])
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_of_a_page_runs(page: Path, folder: Path) -> None:
    assert run_page(page, folder)


def test_there_are_many_and_all_of_known_programs() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 80
    assert {words[0] for words in found} == set(PROGRAMS)
