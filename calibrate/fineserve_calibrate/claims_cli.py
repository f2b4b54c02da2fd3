"""``fineserve-calibrate claims``: what the measurements say of the papers' claims that take a GPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fineserve_calibrate.claims import Evidence, Verdict

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
    from fineserve_calibrate.claims import EVALUATORS, ClaimError, Evidence, ids_of, read_probes
    from fineserve_sim.cli.console import console
    from fineserve_sim.latency.tables import shipped

    known = list(EVALUATORS) if claims_file is None else ids_of(claims_file)
    unknown = [name for name in ids or () if name not in known]
    if unknown:
        raise ClaimError(f"--id {unknown[0]}: no such claim; known: {', '.join(known)}")
    evidence = Evidence(shipped(), read_probes(probes) if probes is not None else {})
    verdicts = {name: _verdict(name, evidence) for name in ids or known}
    if as_json:
        typer.echo(json.dumps([{"id": name, **verdict.as_dict()} for name, verdict in verdicts.items()], indent=1))
        return
    screen = console()
    for name, verdict in verdicts.items():
        screen.print(f"[{STYLES[verdict.status]}]{verdict.status:5}[/] {name:20} {_text(verdict)}", soft_wrap=True)
    counts: Counter[str] = Counter(verdict.status for verdict in verdicts.values())
    screen.print(", ".join(f"{counts[status]} {status}" for status in STYLES))


def _verdict(name: str, evidence: Evidence) -> Verdict:
    from fineserve_calibrate.claims import EVALUATORS
    from fineserve_calibrate.claims.evidence import undecided

    if name not in EVALUATORS:
        return undecided("no evaluator knows this claim")
    return EVALUATORS[name](evidence)


def _text(verdict: Verdict) -> str:
    parts = [verdict.found, f"({verdict.evidence})" if verdict.evidence else ""]
    parts.append(f"needs: {verdict.decide}" if verdict.decide else "")
    return " ".join(part for part in parts if part).replace("[", r"\[")
