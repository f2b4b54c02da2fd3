"""The commands of ``fineserve-calibrate`` that compare predictions with measurements.

A command imports what it needs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from fineserve_calibrate.importers import SYSTEMS, BackendOption, Int4Option, SystemOption, WheelOption

from fineserve_evidence.campaign import MINUTES

if TYPE_CHECKING:
    from fineserve_evidence.claims import Verdict
    from fineserve_evidence.validate.predict import StepFactory
    from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec
    from fineserve_sim.latency import StepModel


class Latency(StrEnum):
    """The step model that predicts."""

    ROOFLINE = "roofline"
    TABLES = "tables"
    SCALED = "scaled"


def step_factory(latency: Latency) -> StepFactory:
    """Make step models: by rooflines, by the GPU's own tables where there are any, or by the H100's, scaled by data sheets."""
    from fineserve_sim.latency import step_model_of
    from fineserve_sim.latency.tables import measured_on, shipped

    def by_tables(
        model: ModelSpec, precision: PrecisionSpec, tp: int, gpu: GpuSpec, deployment: Deployment
    ) -> StepModel:
        return step_model_of(model, precision, tp, gpu, deployment, measured_on(gpu) or shipped())

    if latency is Latency.TABLES:
        return by_tables
    return step_model_of if latency is Latency.ROOFLINE else partial(step_model_of, tables=shipped())


def validate(
    set_files: Annotated[
        list[Path] | None,
        typer.Option("--set", metavar="FILE", help="Validate this file instead, of a known column layout; may repeat."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder with measured sets, in it or in e2e/; our own come, too."),
    ] = None,
    latency: Annotated[Latency, typer.Option("--latency", help="The step model.")] = Latency.TABLES,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the figures here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows to stdout, and nothing else there.")] = False,
    with_sensitivity: Annotated[
        bool, typer.Option("--sensitivity/--no-sensitivity", help="Also predict under other readings of each set.")
    ] = True,
) -> None:
    """Predict every row of measured end-to-end sets; print median, p90 and bias of the errors of TTFT and TPOT."""
    from fineserve_evidence.validate.errors import draw_sets, error_rows, tell, whole_rows
    from fineserve_evidence.validate.layouts import read_set
    from fineserve_evidence.validate.predict import predict_set
    from fineserve_evidence.validate.shares import draw_shares

    make_step = step_factory(latency)
    sets = [read_set(path, make_step) for path in _files(set_files, data)]
    predictions = [predict_set(measured, make_step) for measured in sets]
    rows = [row for found in predictions for row in error_rows(found)]
    if as_json:
        wholes = [row._asdict() for found in predictions for row in whole_rows(found)]
        listed = [*(row.as_dict() for row in rows), *wholes]
        typer.echo(json.dumps(listed, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        tell(sets, predictions, make_step if with_sensitivity else None)
    if out is not None:
        by_set = {measured.name: found for measured, found in zip(sets, predictions, strict=True)}
        for path in (*draw_sets(by_set, out), *draw_shares(by_set, out)):
            typer.echo(f"wrote {path}", err=True)


def _files(set_files: Sequence[Path] | None, data: Path | None) -> list[Path]:
    """The files to read. Raises LayoutError naming what is missing."""
    from fineserve_evidence.validate.layouts import KNOWN_FILES, OWN_FILES, LayoutError

    if set_files:
        missing = [path for path in set_files if not path.is_file()]
        if missing:
            raise LayoutError(f"--set {missing[0]}: no such file")
        return list(set_files)
    if data is None:
        raise LayoutError("name what to validate: --data DIR with the measured sets, or --set FILE")
    folder = data / "e2e" if (data / "e2e").is_dir() else data
    found = [folder / name for name in KNOWN_FILES if (folder / name).is_file()]
    if not found:
        raise LayoutError(f"--data {data}: none of the measured sets is there; expected {', '.join(KNOWN_FILES)}")
    return [*found, *OWN_FILES]


STYLES = {"holds": "green", "fails": "red", "open": "yellow"}


def claims(
    ids: Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="Only this claim; may repeat.")] = None,
    claims_file: Annotated[
        Path | None, typer.Option("--claims-file", metavar="FILE", help="The claims of this ledger (YAML).")
    ] = None,
    probes: Annotated[
        Path | None,
        typer.Option("--probes", metavar="DIR", help="Folder of tables that fineserve-calibrate --gpu wrote."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False,
) -> None:
    """Decide the papers' claims that take a GPU, from the imported tables and from probes; open ones say what would decide."""
    from fineserve_evidence.claims import EVALUATORS, ClaimError, Evidence, ids_of, read_probes, verdict_of
    from fineserve_sim.cli.console import console
    from fineserve_sim.latency.tables import shipped

    known = list(EVALUATORS) if claims_file is None else ids_of(claims_file)
    unknown = [name for name in ids or () if name not in known]
    if unknown:
        raise ClaimError(f"--id {unknown[0]}: no such claim; known: {', '.join(known)}")
    evidence = Evidence(shipped(), read_probes(probes) if probes is not None else {})
    verdicts = {name: verdict_of(name, evidence) for name in ids or known}
    if as_json:
        typer.echo(json.dumps([{"id": name, **verdict.as_dict()} for name, verdict in verdicts.items()], indent=1))
        return
    screen = console()
    for name, verdict in verdicts.items():
        screen.print(f"[{STYLES[verdict.status]}]{verdict.status:5}[/] {name:20} {_text(verdict)}", soft_wrap=True)
    counts: Counter[str] = Counter(verdict.status for verdict in verdicts.values())
    screen.print(", ".join(f"{counts[status]} {status}" for status in STYLES))


def _text(verdict: Verdict) -> str:
    parts = [verdict.found, f"({verdict.evidence})" if verdict.evidence else ""]
    parts.append(f"needs: {verdict.decide}" if verdict.decide else "")
    return " ".join(part for part in parts if part).replace("[", r"\[")


class SharingError(ValueError):
    """A folder lacks the measurements. The text is one line."""


def sharing(
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Folder with the measurements, in it or in sharing/.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False,
) -> None:
    """Slowdowns of engines under thread caps, MPS, time-slicing and MIG: measured, and predicted by the laws."""
    from fineserve_evidence.sharing import caps, pairs
    from fineserve_sim.cli.console import console
    from fineserve_sim.latency.sharing import MEMORY_SATURATION

    folder = data / "sharing" if (data / "sharing").is_dir() else data
    missing = [name for name in (caps.FILE, pairs.PAIRS, pairs.REPLICAS) if not (folder / name).is_file()]
    if missing:
        raise SharingError(f"--data {data}: no {missing[0]} in it")
    make_step = step_factory(Latency.TABLES)
    rows = caps.read_caps(folder / caps.FILE, make_step)
    authors = [folder.parent / "e2e" / name for name in caps.AUTHORS_FILES]
    profiles = [caps.read_authors_caps(path, make_step) for path in authors if path.is_file()]
    errors = [one for found in (rows, *profiles) for one in caps.cap_errors(found)]
    compared = [
        *pairs.compare_replicas(folder / pairs.REPLICAS),
        *pairs.compare_pairs(folder / pairs.PAIRS, make_step),
    ]
    if as_json:
        payload = {"caps": [one._asdict() for one in errors], "compared": [one._asdict() for one in compared]}
        typer.echo(json.dumps(payload, indent=1, ensure_ascii=False))
        return
    screen = console()
    screen.print(caps.cap_table(errors))
    fitted = caps.fit_saturation(rows)
    screen.print(f"memory saturates at {fitted:.3f} of the SMs on LLaMA-7B and 13B; in use {MEMORY_SATURATION}\n")
    screen.print(pairs.compared_table(compared))


def campaign(
    gpu_name: Annotated[
        str, typer.Option("--gpu", help="h100, h200, ... (checked), auto (the GPU that is there) or cpu.")
    ],
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Begin nothing that would not end within so many minutes.")
    ] = MINUTES,
    out: Annotated[Path | None, typer.Option(help="Folder; calibration/GPU-campaign unless given.")] = None,
    only: Annotated[str | None, typer.Option(help="Only parts with one of these texts, separated by commas.")] = None,
    retry: Annotated[bool, typer.Option(help="Try again what could not be measured.")] = False,
    show_plan: Annotated[
        bool, typer.Option("--plan", help="Print the parts and their expected minutes; no more.")
    ] = False,
) -> None:
    """Several engines on one device, then steps, driver, layouts and runtime; the same command goes on where it stopped."""
    from fineserve_evidence.campaign import command

    request = command.Request(gpu_name, minutes, out, only, retry)
    if show_plan:
        typer.echo("\n".join(command.plan_lines(command.planned(request)[2])))
        return
    try:
        archive = command.campaign(request, typer.echo)
    except KeyboardInterrupt:
        typer.echo("interrupted; what was measured is packed, and the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"packed {archive}; fineserve-calibrate report {archive} says what to commit")


def cross_validate(
    wheel: WheelOption = "installed",
    system: SystemOption = "h100_sxm",
    backend: BackendOption = "vllm",
    int4: Int4Option = None,
    out: Annotated[Path | None, typer.Option(help="Figure to write: this path with .png and .svg.")] = None,
) -> None:
    """Errors of the imported tables on their own rows, against table size: thinned to 1/2, 1/4 and 1/8 along each axis."""
    from fineserve_calibrate.compaction import compact
    from fineserve_calibrate.importers.aiconfigurator import imported

    from fineserve_evidence.crossvalidation import curve, draw_curve
    from fineserve_sim.catalog import gpu
    from fineserve_sim.cli.console import console

    tables = imported(wheel, system, backend, int4)  # ends the command for an unknown system
    reference = gpu(SYSTEMS[system])
    screen = console()
    header = f"{'table':32}{'axis':15}{'kept':>5}{'rows kept':>11}{'predicted':>11}{'median':>8}{'p95':>8}"
    screen.print(header, soft_wrap=True)
    rows = list(curve(compact(tables, reference, thin=False), reference, (2, 4, 8)))
    for row in rows:
        counts = f"{f'1/{row.keep_every}':>5}{row.rows_kept:>11,}{row.rows:>11,}"
        line = f"{row.table:32}{row.axis:15}{counts}{row.median:>8.1%}{row.p95:>8.1%}"
        screen.print(line, soft_wrap=True)
    for path in draw_curve(rows, out.with_suffix("")) if out else []:
        print(f"wrote {path}", file=sys.stderr)
