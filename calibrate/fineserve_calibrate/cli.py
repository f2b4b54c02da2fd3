"""``fineserve-calibrate``: make the latency tables that the simulator predicts with, and show how far it can be trusted.

The commands that compare predictions with measurements come from ``fineserve_evidence``.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from fineserve_evidence import commands

from fineserve_calibrate.importers import SYSTEMS, BackendOption, Int4Option, SystemOption, WheelOption
from fineserve_sim.cli.console import console
from fineserve_sim.cli.program import run

if TYPE_CHECKING:
    from fineserve_calibrate.fit.report import Report
    from fineserve_sim.latency.tables import TableSet

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Make and validate the simulator's latency tables.",
)
importers = typer.Typer(no_args_is_help=True, help="Import tables that others published.")
app.add_typer(importers, name="import")


@app.callback()
def _probe(
    context: typer.Context,
    gpu_name: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="Measure this device: h100, h200, a100, ... (checked), auto (the GPU that is there) or cpu."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Two minutes, coarse grids.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and report; calibration/DEVICE unless given.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="config.json, or its folder, of the model whose engine steps are timed.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only the parts with this text in their names.")] = None,
) -> None:
    """Measure the device that is there (--gpu), or run a command on tables and measurements."""
    from fineserve_calibrate.probes.schema import ProbeError

    given = [
        name for name, value in (("--quick", quick), ("--out", out), ("--model", model), ("--only", only)) if value
    ]
    if gpu_name is None and given:
        raise ProbeError(f"{given[0]}: give --gpu, too; its own options stand behind a command")
    if gpu_name is not None and context.invoked_subcommand is not None:
        raise ProbeError(f"--gpu before {context.invoked_subcommand}: measure or run a command, not both")
    if gpu_name is not None:
        from fineserve_calibrate.probes.session import probe

        report(probe(gpu_name, quick, out, model, only, console()))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that --gpu or campaign wrote, or its archive.")],
) -> None:
    """Tables and report of what a measurement or a campaign has finished; no device is needed."""
    from fineserve_evidence.campaign.record import is_campaign
    from fineserve_evidence.campaign.report import conclude as conclude_campaign

    from fineserve_calibrate.probes.report import conclude

    written = conclude_campaign(folder) if is_campaign(folder) else conclude(folder)
    for path in written:
        console().print(f"wrote {path}", soft_wrap=True)


@importers.callback()
def _imports() -> None:
    """Import tables that others published."""  # a group even while it has one command


@importers.command("aiconfigurator")
def import_aiconfigurator(
    out: Annotated[Path, typer.Option(help="Compact table set to write (.npz).")],
    wheel: WheelOption = "installed",
    system: SystemOption = "h100_sxm",
    backend: BackendOption = "vllm",
    int4: Int4Option = None,
    full: Annotated[Path | None, typer.Option(help="Folder for the full tables (Parquet).")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="The layers that not every model has (experts, latent attention).")
    ] = False,
) -> None:
    """The measured kernel tables of aiconfigurator-core (NVIDIA, Apache-2.0)."""
    from fineserve_calibrate.compaction import compact
    from fineserve_calibrate.importers.aiconfigurator import imported
    from fineserve_calibrate.tables import write_table
    from fineserve_sim.catalog import gpu

    if layers:
        from fineserve_calibrate.importers.layers import import_layers

        _write_tables(out, import_layers(wheel, system, backend))
        return
    tables = imported(wheel, system, backend, int4)
    compacted = compact(tables, gpu(SYSTEMS[system]))
    if full is not None:
        full.mkdir(parents=True, exist_ok=True)
        for table in tables:
            suffix = "_int4_wo" if set(table.columns["dtype"]) == {"int4_wo"} else ""
            write_table(table, full / f"{table.operator}{suffix}.parquet")
    _write_tables(out, compacted)


@importers.command("llmservingsim")
def import_llmservingsim(
    profiles: Annotated[Path, typer.Argument(help="Folder or tar file with profiler/perf/GPU/OWNER/MODEL.")],
    out: Annotated[Path, typer.Option(help="Compact table set to write (.npz).")],
    gpu: Annotated[str, typer.Option(help="The GPU, by its name in the catalog.")] = "rtx-4090",
    into: Annotated[
        Path | None, typer.Option(help="Tables of a GPU in which decode attention is replaced by the profiled one.")
    ] = None,
) -> None:
    """The layers that LLMServingSim's authors profiled under vLLM (KAIST, MIT)."""
    from fineserve_calibrate.importers.servingsim import import_profiles, with_decodes
    from fineserve_sim.latency.tables import load

    _write_tables(out, import_profiles(profiles, gpu) if into is None else with_decodes(profiles, load(into)))


def _write_tables(out: Path, compacted: TableSet) -> None:
    from fineserve_sim.latency.tables import save

    save(out, compacted)
    for name, text in compacted.fingerprint.items():
        console().print(f"{name}: {text}", soft_wrap=True)
    console().print(f"{out}: {out.stat().st_size / 1e6:.2f} MB", soft_wrap=True)


app.command("cross-validate")(commands.cross_validate)
app.command()(commands.campaign)
app.command()(commands.validate)
app.command()(commands.claims)


class What(StrEnum):
    """A cost model to fit."""

    CHUNK_COST = "chunk-cost"
    HOST_OVERHEAD = "host-overhead"
    CONTENTION = "contention"


@app.command()
def fit(
    what: Annotated[What, typer.Argument(help="Cost model to fit.")],
    rows: Annotated[
        Path | None,
        typer.Argument(help="CSV file of measured rows; chunk-cost without one fits the simulator's own steps."),
    ] = None,
    gpu_name: Annotated[str, typer.Option("--gpu", help="Catalog GPU of the rows.")] = "h100-sxm",
    deployment_name: Annotated[
        str, typer.Option("--deployment", help="Host times of the simulated steps (chunk-cost, contention).")
    ] = "vllm-0.9.1-authors",
    model_name: Annotated[
        str, typer.Option("--model", help="Model of the simulated steps (chunk-cost).")
    ] = "llama-3.1-8b",
    precision_name: Annotated[
        str, typer.Option("--precision", help="Precision of the simulated steps (chunk-cost).")
    ] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Figure to write: this path with .png and .svg.")] = None,
) -> None:
    """Fit the chunk cost, the host overhead or the contention model to measured rows."""
    report = _fitted(what, rows, gpu_name, (model_name, precision_name, deployment_name))
    _show(report, as_json)
    for path in report.draw(out.with_suffix("")) if out else []:
        typer.echo(f"wrote {path}", err=True)
    if all(fitted.refused for fitted in report.fits):
        typer.echo("fineserve-calibrate: error: every fit was refused", err=True)
        raise typer.Exit(1)


def _fitted(what: What, rows: Path | None, gpu_name: str, simulated: tuple[str, str, str]) -> Report:
    """Raises ValueError, RowError among them, for rows that cannot be used and names that the catalog lacks. ``simulated``: the
    model, precision and deployment of simulated steps."""
    from fineserve_calibrate.fit import report
    from fineserve_calibrate.fit.rows import RowError
    from fineserve_sim.catalog import deployment, gpu, model, precision
    from fineserve_sim.latency import StepModel

    model_name, precision_name, deployment_name = simulated
    if what is What.CHUNK_COST:
        step = StepModel(model(model_name), precision(precision_name), 1, gpu(gpu_name), deployment(deployment_name))
        return report.chunk_cost(rows, step)
    if rows is None:
        raise RowError(
            f"fit {what.value}: no file of measured rows; give one, or fit chunk-cost, which can simulate its rows"
        )
    if what is What.HOST_OVERHEAD:
        return report.host_overhead(rows, gpu_name)
    return report.contention(rows, gpu_name, deployment_name)


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.payload, indent=1))
        return
    screen = console()
    for table in report.tables:
        screen.print(table)
    if report.note:
        screen.print(report.note)


app.command()(commands.sharing)


def main() -> None:
    """Entry point of the console script. A user's mistake is one line on stderr, exit 2."""
    run(app, "fineserve-calibrate")


if __name__ == "__main__":
    main()
