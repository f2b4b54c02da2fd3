"""What becomes of the claims when a paper is read in another way.

Papers leave options of their policies open; ``systems/readings.yaml`` lists each with the values that its text allows. A sweep
takes one value at a time and gives it to every system that has the default there. It runs the experiments that have such a
system and decides their claims again. A claim is then reproduced under every reading, under some, or under none. That says more
than one verdict, whose reading was a choice.

The sweep changes one reading at a time, so it does not see what two of them do together.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.reproduce.ledger import LedgerError, Target
from fineserve_sim.experiment.reproduce.session import Experiments, Row, needs, reproduce
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.systems import OpenReading, SystemSpec, open_readings

COLUMNS = ("option", "value", "claim", "verdict")
Under = Literal["every", "some", "none"]
Verdicts = dict[tuple[str, str], dict[str, str]]
"""By option and value, the verdict on each claim that the reading touches. ``DEFAULT`` has all claims, in such runs."""
DEFAULT = "default", ""


def sweep(
    targets: Sequence[Target],
    experiments: Experiments,
    out: Path,
    found: Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
) -> Verdicts:
    """Decide the targets under the defaults and every other reading. ``found`` is a CSV file: readings in it are not run again,
    and each new one is added as it is done. Readings that are no longer open count for nothing. Simulations are kept below
    ``out``; ``summary.json`` there is of the last reading.

    Raises LedgerError for a file that is none of ours; otherwise as ``reproduce``.
    """
    is_open = {DEFAULT, *((reading.option, str(value)) for reading, value in _alternatives())}
    known = {key: verdicts for key, verdicts in read(found).items() if key in is_open}
    decide = partial(reproduce, out=out, jobs=jobs, executor=executor, on_progress=on_progress)
    for key, touched, read_so in _readings(targets, experiments):
        if key not in known and touched:
            known[key] = {row.target.id: row.verdict for row in decide(touched, read_so)}
            _write(known, found)
    return known


def _readings(
    targets: Sequence[Target], experiments: Experiments
) -> Iterator[tuple[tuple[str, str], Sequence[Target], Experiments]]:
    """The default and every other reading: its key, the targets that it touches, and the experiments so read."""
    yield DEFAULT, targets, experiments
    needed = {target.id: needs(target, experiments) for target in targets}
    for reading, value in _alternatives():
        changed = {name: read_as(each, reading, value) for name, each in experiments.readable.items()}
        moved = {name for name, each in changed.items() if each is not experiments.readable[name]}
        touched = [target for target in targets if needed[target.id] & moved]
        yield (reading.option, str(value)), touched, Experiments(changed, experiments.broken)


def _alternatives() -> Iterator[tuple[OpenReading, Any]]:
    return ((reading, value) for reading in open_readings() for value in reading.values[1:])


def read_as(experiment: Experiment, reading: OpenReading, value: Any) -> Experiment:
    """The experiment with ``value`` in every system that has the reading's default; itself, if no system of its sweeps has."""
    named = {point.system for point in experiment.points}
    setups = {
        key: replace(
            setup, systems={name: system_read_as(system, reading, value) for name, system in setup.systems.items()}
        )
        for key, setup in experiment.setups.items()
    }
    changed = any(
        setups[key].systems[name] != setup.systems[name] for key, setup in experiment.setups.items() for name in named
    )
    return replace(experiment, setups=setups) if changed else experiment


def system_read_as(system: SystemSpec, reading: OpenReading, value: Any) -> SystemSpec:
    """The system with ``value`` where it has the reading's default; itself, where it has not."""
    for each in (reading.option, *reading.also):
        axis, name, option = each.split(".")
        policy = getattr(system, axis)
        if policy is not None and policy.policy == name and getattr(policy, option) == reading.values[0]:
            changed = {option: value} if option == "policy" else policy.model_dump() | {option: value}
            return SystemSpec.model_validate(system.model_dump() | {axis: changed})
    return system


def under(row: Row, verdicts: Verdicts) -> Under:
    """Under which readings of ``verdicts`` the claim is reproduced; under the default, which ``row`` has, where it has none."""
    seen = {found[row.target.id] for found in verdicts.values() if row.target.id in found} or {row.verdict}
    if "reproduced" not in seen:
        return "none"
    return "every" if len(seen) == 1 else "some"


def moves(row: Row, verdicts: Verdicts) -> list[str]:
    """The readings, as ``option=value``, under which a claim gets or loses *reproduced* against the default."""
    found = {key: each[row.target.id] for key, each in verdicts.items() if row.target.id in each}
    is_out = found.pop(DEFAULT, row.verdict) != "reproduced"
    return [f"{option}={value}" for (option, value), each in found.items() if (each != "reproduced") != is_out]


def read(path: Path) -> Verdicts:
    """The verdicts in a file of ``sweep``; none where there is no file. Raises LedgerError for a file that is none of ours."""
    known: Verdicts = {}
    if not path.exists():
        return known
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise LedgerError(f"{path}: expected a CSV file with the columns {', '.join(COLUMNS)}")
        for row in rows:
            known.setdefault((row["option"], row["value"]), {})[row["claim"]] = row["verdict"]
    return known


def _write(verdicts: Mapping[tuple[str, str], Mapping[str, str]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as lines:
        rows = csv.writer(lines, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows((*key, claim, verdict) for key, found in verdicts.items() for claim, verdict in found.items())
