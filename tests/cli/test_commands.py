"""The commands that only read: list, describe, traces stats, help."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from fineserve_sim import __version__, catalog
from fineserve_sim.build import build
from fineserve_sim.cli.app import app
from fineserve_sim.cli.catalog import complete_gpu, complete_kind, complete_system
from fineserve_sim.systems import SystemSpec, load_systems

KINDS = ("systems", "models", "gpus", "precisions", "policies")


@pytest.mark.parametrize("kind", KINDS)
def test_every_list_has_a_line_an_entry_and_the_same_entries_as_json(call: Any, kind: str) -> None:
    listed = call("list", kind)
    entries = json.loads(call("list", kind, "--json").out)
    lines = listed.out.splitlines()
    assert listed.code == 0
    assert len(lines) == 1 + len(entries)
    for line, entry in zip(lines[1:], entries, strict=True):
        assert entry["name"] in line.split()


def test_list_tells_sizes(call: Any) -> None:
    models = {line.split()[0]: line.split() for line in call("list", "models").out.splitlines()}
    assert models["llama-3.1-8b"][1:] == ["8.03", "B", "32", "128", "KiB"]  # Llama 3 herd: 8 KV heads of 128, 32 layers
    gpus = {line.split()[0]: line for line in call("list", "gpus").out.splitlines()}
    assert "79.22 GiB" in gpus["h100-sxm"] and "measured" in gpus["h100-sxm"]
    assert "scaled" in gpus["h200-sxm"]


def test_list_policies_has_every_policy_of_every_system(call: Any) -> None:
    listed = {(entry["axis"], entry["name"]) for entry in json.loads(call("list", "policies", "--json").out)}
    used = {
        (axis, getattr(system, axis).policy)
        for system in load_systems().values()
        for axis in ("placement", "scheduler", "memory")
    }
    assert used < listed
    assert all(entry["doc"] for entry in json.loads(call("list", "policies", "--json").out))


@pytest.mark.parametrize("name", list(load_systems()))
def test_describe_ends_with_a_system_file_that_means_the_same(call: Any, name: str) -> None:
    shown = call("describe", name)
    assert shown.code == 0
    text = shown.out.split("YAML\n")[1]
    assert SystemSpec.model_validate(yaml.safe_load(text)) == load_systems()[name]


def test_describe_shows_policies_with_their_options_and_defaults(call: Any) -> None:
    shown = call("describe", "fineserve").out
    assert "scheduler: adaptive" in shown
    assert "when_prefilling = skip  (skip | union)" in shown
    axes = json.loads(call("describe", "fineserve", "--json").out)["axes"]
    scheduler = next(axis for axis in axes if axis["axis"] == "scheduler")
    assert scheduler["options"] == [{"name": "when_prefilling", "choices": "skip | union", "default": "skip"}]
    assert scheduler["values"] == {"when_prefilling": "skip"}


def test_trace_statistics_as_a_table_and_as_json(call: Any, trace: Path) -> None:
    shown = call("traces", "stats", str(trace))
    assert shown.code == 0
    found = json.loads(call("traces", "stats", str(trace), "--json").out)
    assert (found["requests"], found["span_s"], found["model_shares"]) == (40, 9.75, {"A": 0.5, "B": 0.5})
    lines = {tuple(line.split()) for line in shown.out.splitlines()}
    assert {("requests", "40"), ("span", "(s)", "9.75"), ("share", "of", "model", "A", "(%)", "50")} <= lines


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"fineserve-sim {__version__} ({build()})\n"


@pytest.mark.parametrize("command", [["run"], ["compare"], ["plot"], ["list"], ["describe"], ["traces", "stats"]])
def test_the_help_of_every_command_has_examples(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "Examples:" in shown.output
    assert f"fineserve-sim {' '.join(command)} " in shown.output
    assert "--json" in shown.output


PROGRAMS = ("fineserve_sim.cli", "fineserve_calibrate.cli", "fineserve_runtime.cli")
HEAVY = {"numpy", "pandas", "pyarrow", "matplotlib", "simpy", "scipy", "pydantic", "yaml", "torch"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_quick_and_imports_nothing_heavy(program: str) -> None:
    """Beside typer and rich, which every command line needs, help imports at most a third as many modules."""
    help_code = (
        "import sys; sys.argv = ['program', '--help']\n"
        f"from {program} import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
    )
    shown = _output(f"{help_code}print(sorted({HEAVY} & set(sys.modules)))")
    assert "Usage: " in shown and shown.splitlines()[-1] == "[]"
    ours, least = (int(_output(f"{code}print(len(sys.modules))").splitlines()[-1]) for code in (help_code, LEAST))
    assert ours < 4 / 3 * least


LEAST = """
import sys, typer, rich.markdown
sys.argv = ["program", "--help"]
app = typer.Typer(rich_markup_mode="markdown")
app.command()(lambda: None)
try: app()
except SystemExit: pass
"""
"""The help of a command line that has one command without options."""


def _output(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_traceback_reaches_the_user(spawn: Callable[..., subprocess.Popen[str]]) -> None:
    process = spawn("run", "absent.yaml")
    assert process.communicate() == (
        "",
        "fineserve-sim: error: absent.yaml: cannot be read: No such file or directory\n",
    )
    assert process.returncode == 2


def test_unknown_commands_and_options_exit_2_with_the_nearest() -> None:
    runner = CliRunner()
    for arguments, hint in ((["lst"], "list"), (["run", "--jbos", "3"], "--jobs")):
        failed = runner.invoke(app, arguments)
        assert failed.exit_code == 2
        assert hint in failed.output


def test_names_complete() -> None:
    assert complete_system("fine") == ["fineserve"]
    assert set(complete_gpu("h100")) == {name for name in catalog.gpus() if name.startswith("h100")}
    assert tuple(complete_kind("")) == KINDS
    assert CliRunner().invoke(app, ["--help"]).output.count("--install-completion") == 1


def test_into_a_pipe_no_row_is_broken_whatever_the_environment_says_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fineserve_sim.cli.console import print_rows

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_rows(("what", "why"), [("long", "word " * 200)])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json_means_the_same_everywhere() -> None:
    """A flag that prints JSON to stdout, whatever the command."""
    group: Any = typer.main.get_command(app)
    found = {
        option.help for name in group.commands for option in group.commands[name].params if "--json" in option.opts
    }
    flags = [
        option.is_flag for name in group.commands for option in group.commands[name].params if "--json" in option.opts
    ]
    assert found == {"Print JSON to stdout, and nothing else there."} and all(flags) and len(flags) >= 8
