"""``fineserve-calibrate``: make the latency tables that the simulator predicts with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineserve_calibrate.campaign_cli import campaign
from fineserve_calibrate.claims_cli import claims
from fineserve_calibrate.fit_cli import fit
from fineserve_calibrate.importers.systems import SYSTEMS
from fineserve_calibrate.sharing_cli import sharing
from fineserve_calibrate.validate_cli import validate
from fineserve_sim.cli.console import console
from fineserve_sim.cli.program import run

if TYPE_CHECKING:
    from fineserve_calibrate.tables import Table

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
            "--gpu", help="Measure this device: h100, h200, a100, ... (checked), auto (whatever is there) or cpu."
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
    from fineserve_calibrate.probes.backend import ProbeError

    given = [
        name for name, value in (("--quick", quick), ("--out", out), ("--model", model), ("--only", only)) if value
    ]
    if gpu_name is None and given:
        raise ProbeError(f"{given[0]}: give --gpu, too; its own options stand behind a command")
    if gpu_name is not None and context.invoked_subcommand is not None:
        raise ProbeError(f"--gpu before {context.invoked_subcommand}: measure or run a command, not both")
    if gpu_name is not None:
        from fineserve_calibrate.probes.command import probe

        report(probe(gpu_name, quick, out, model, only, console()))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that --gpu or campaign wrote, or its archive.")],
) -> None:
    """Tables and report of what a measurement or a campaign has finished; no device is needed."""
    from fineserve_calibrate.campaign.archive import is_campaign
    from fineserve_calibrate.campaign.report import conclude as conclude_campaign
    from fineserve_calibrate.probes.conclusion import conclude

    written = conclude_campaign(folder) if is_campaign(folder) else conclude(folder)
    for path in written:
        console().print(f"wrote {path}", soft_wrap=True)


@importers.callback()
def _imports() -> None:
    """Import tables that others published."""  # a group even while it has one command


WheelOption = Annotated[str, typer.Option(help="Wheel file of aiconfigurator-core, or 'installed'.")]
SystemOption = Annotated[str, typer.Option(help=f"One of {', '.join(SYSTEMS)}.")]
BackendOption = Annotated[str, typer.Option(help="vllm, trtllm or sglang.")]
Int4Option = Annotated[
    Path | None, typer.Option(help="CSV file with int4_wo GEMM rows (gemm_perf of aiconfigurator 0.5.0).")
]


def _imported(wheel: str, system: str, backend: str, int4: Path | None) -> list[Table]:
    """The checked tables. Raises TableError for one that cannot be used."""
    from fineserve_calibrate.importers.aiconfigurator import Installed, Wheel, import_tables

    source = Installed() if wheel == "installed" else Wheel(Path(wheel))
    return import_tables(source, system, backend, int4)


@importers.command("aiconfigurator")
def import_aiconfigurator(
    out: Annotated[Path, typer.Option(help="Compact table set to write (.npz).")],
    wheel: WheelOption = "installed",
    system: SystemOption = "h100_sxm",
    backend: BackendOption = "vllm",
    int4: Int4Option = None,
    full: Annotated[Path | None, typer.Option(help="Folder for the full tables (Parquet).")] = None,
) -> None:
    """The measured kernel tables of aiconfigurator-core (NVIDIA, Apache-2.0)."""
    from fineserve_calibrate.compaction import compact
    from fineserve_calibrate.tables import write_table
    from fineserve_sim.catalog import gpu
    from fineserve_sim.latency.tables import save

    tables = _imported(wheel, system, backend, int4)
    compacted = compact(tables, gpu(SYSTEMS[system][0]))
    if full is not None:
        full.mkdir(parents=True, exist_ok=True)
        for table in tables:
            suffix = "_int4_wo" if set(table.columns["dtype"]) == {"int4_wo"} else ""
            write_table(table, full / f"{table.operator}{suffix}.parquet")
    save(out, compacted)
    for name, text in compacted.fingerprint.items():
        console().print(f"{name}: {text}", soft_wrap=True)
    console().print(f"{out}: {out.stat().st_size / 1e6:.2f} MB", soft_wrap=True)


@app.command("cross-validate")
def cross_validate(
    wheel: WheelOption = "installed",
    system: SystemOption = "h100_sxm",
    backend: BackendOption = "vllm",
    int4: Int4Option = None,
    out: Annotated[Path | None, typer.Option(help="Figure to write: this path with .png and .svg.")] = None,
) -> None:
    """Errors of the imported tables on their own rows, against table size: thinned to 1/2, 1/4 and 1/8 along each axis."""
    from fineserve_calibrate.compaction import compact
    from fineserve_calibrate.crossvalidation import curve
    from fineserve_sim.catalog import gpu

    tables = _imported(wheel, system, backend, int4)  # ends the command for an unknown system
    reference = gpu(SYSTEMS[system][0])
    screen = console()
    header = f"{'table':32}{'axis':15}{'kept':>5}{'rows kept':>11}{'predicted':>11}{'median':>8}{'p95':>8}"
    screen.print(header, soft_wrap=True)
    rows = list(curve(compact(tables, reference, thin=False), reference, (2, 4, 8)))
    for row in rows:
        counts = f"{f'1/{row.keep_every}':>5}{row.rows_kept:>11,}{row.rows:>11,}"
        line = f"{row.table:32}{row.axis:15}{counts}{row.median:>8.1%}{row.p95:>8.1%}"
        screen.print(line, soft_wrap=True)
    if out is not None:
        from fineserve_calibrate.crossvalidation_figure import draw_curve

        for path in draw_curve(rows, out.with_suffix("")):
            print(f"wrote {path}", file=sys.stderr)


app.command()(campaign)
app.command()(validate)
app.command()(claims)
app.command()(fit)
app.command()(sharing)


def main() -> None:
    """Entry point of the console script. A user's mistake is one line on stderr, exit 2."""
    run(app, "fineserve-calibrate")


if __name__ == "__main__":
    main()
