"""Do two checkouts give the same results? Runs every experiment file with ``--quick`` in both and compares by content.

    python benchmarks/compare_checkouts.py BASELINE CANDIDATE [--only fig13,kunserve_*] [--keep DIR] [--out DIR]

One line a file of results: equal, or the first differences with row, column and both values. ``cells.parquet``,
``requests.parquet`` and ``summary.json`` are compared, and of every run its timeline and its ``cells/KEY.json``. The keys
of runs, which hash the code, may differ; so may ``environment.json``, ``resolved.yaml`` (paths) and decision logs, which
are not looked at. A file that runs in neither checkout is skipped with the reason. Exit status 1 on a difference.

``--keep DIR`` holds the baseline's results by name of the experiment: what is there is not computed again, so the folder
is good for one baseline only. ``--out DIR`` keeps the candidate's, which are always computed anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

SOURCES = ("", "traces", "calibrate", "runtime")
"""Folders of a checkout that hold packages."""

RUN = """
import sys
from pathlib import Path
from fineserve_sim.experiment import run_experiment
run_experiment(Path(sys.argv[1]), Path(sys.argv[2]), quick=True, jobs=int(sys.argv[3]))
"""
NAMES = ("run", "runs")
"""Columns and keys that hold the names of runs."""

LABELS = ("system", "seed", "request")
SHOWN = 3
REASON = "failed.txt"

Differences = Iterator[str]


# --- run ---------------------------------------------------------------------------------------------------------------


def results_of(checkout: Path, name: str, folder: Path, jobs: int) -> str | None:
    """The results of ``experiments/NAME.yaml`` in ``folder``, computed by ``checkout`` unless they are there. Returns why
    there are none, else None."""
    if (folder / REASON).exists():
        return (folder / REASON).read_text()
    if (folder / "summary.json").exists():
        return None
    unfinished = folder.with_name(f".{name}.{os.getpid()}")  # takes its name when it is whole
    unfinished.mkdir(parents=True)
    paths = os.pathsep.join(str(checkout / source) for source in SOURCES)
    command = [sys.executable, "-c", RUN, f"experiments/{name}.yaml", str(unfinished), str(jobs)]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    reason = None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        (unfinished / REASON).write_text(reason)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return reason


def names(checkouts: Sequence[Path], patterns: Sequence[str]) -> list[str]:
    """Experiments of any checkout that one of ``patterns`` names."""
    found = {path.stem for checkout in checkouts for path in (checkout / "experiments").glob("*.yaml")}
    return sorted(name for name in found if any(fnmatch(name, pattern) for pattern in patterns))


# --- compare -----------------------------------------------------------------------------------------------------------


def compared(old: Path, new: Path) -> Iterator[tuple[str, list[str]]]:
    """Each file of two results folders and how it differs, the first ``SHOWN`` places and a count of the others."""
    yield "cells.parquet", _shown(differing_tables(old / "cells.parquet", new / "cells.parquet"))
    yield "requests.parquet", _shown(differing_tables(old / "requests.parquet", new / "requests.parquet"))
    yield "summary.json", _shown(differing_values(_json(old / "summary.json"), _json(new / "summary.json")))
    pairs = list(zip(_runs(old), _runs(new), strict=False))
    yield f"{len(pairs)} timelines", _shown(_of_each(pairs, old, new, ".timeline.parquet"))
    yield f"{len(pairs)} cells/KEY.json", _shown(_of_each(pairs, old, new, ".json"))


def differing_tables(old: Path, new: Path) -> Differences:
    """Where two Parquet files differ, by value; how a column is encoded does not matter. Both may be absent."""
    if not (old.exists() and new.exists()):
        if old.exists() or new.exists():
            yield f"only in the {'baseline' if old.exists() else 'candidate'}"
        return
    first, second = _columns(old), _columns(new)
    for name in [name for name in (first | second) if name not in NAMES]:
        if name not in first or name not in second:
            yield f"column {name} only in the {'baseline' if name in first else 'candidate'}"
            continue
        a, b = first[name], second[name]
        if len(a) != len(b):
            yield f"column {name} has {len(a)} rows and {len(b)}"
            continue
        same = (a == b) | (np.not_equal(a, a) & np.not_equal(b, b))  # NaN alone does not equal itself
        for row in np.flatnonzero(~same):
            labels = " ".join(f"{label} {first[label][row]}" for label in LABELS if label in first)
            yield f"column {name}, row {row}{f' ({labels})' if labels else ''}: {a[row]} != {b[row]}"


def differing_values(old: Any, new: Any, place: str = "") -> Differences:
    """Where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [key for key in (old | new) if key not in NAMES]:
            inner = f"{place}.{key}" if place else key
            if key in old and key in new:
                yield from differing_values(old[key], new[key], inner)
            else:
                yield f"{inner} only in the {'baseline' if key in old else 'candidate'}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differing_values(a, b, f"{place}[{index}]")
    elif type(old) is not type(new) or old != new:
        yield f"{place}: {old!r} != {new!r}"


def _columns(path: Path) -> dict[str, Any]:
    table = pq.read_table(path)
    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        column = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
        found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _runs(folder: Path) -> list[tuple[str, str]]:
    """What each run of a results folder is, in the order of its cells, and its key."""
    columns = _columns(folder / "cells.parquet")
    described = zip(columns["system"], columns["seed"], columns["run"], strict=True)
    return [(f"{row} {system} seed {seed}", key) for row, (system, seed, key) in enumerate(described)]


def _of_each(pairs: Sequence[tuple[tuple[str, str], tuple[str, str]]], old: Path, new: Path, kind: str) -> Differences:
    """Differences of the file ``kind`` of each pair of runs; cells that share a run are looked at once."""
    once = {(first, second): cell for (cell, first), (_, second) in reversed(pairs)}
    for (first, second), cell in reversed(once.items()):
        paths = (old / "cells" / f"{first}{kind}", new / "cells" / f"{second}{kind}")
        found = differing_tables(*paths) if kind.endswith("parquet") else differing_values(*map(_json, paths))
        for difference in found:
            yield f"cell {cell}: {difference}"


def _shown(differences: Differences) -> list[str]:
    shown = list(islice(differences, SHOWN))
    left = sum(1 for _ in differences)
    return [*shown, f"{left} more"] if left else shown


# --- command line ------------------------------------------------------------------------------------------------------


def compare_one(name: str, checkouts: tuple[Path, Path], folders: tuple[Path, Path], jobs: int) -> bool:
    """Run and compare one experiment, and print its lines. False on a difference."""
    reasons = [results_of(*where, jobs) for where in zip(checkouts, (name, name), folders, strict=True)]
    if all(reasons):
        _say(f"{name}: skipped, it runs in neither: {reasons[0]}")
        return True
    if any(reasons):
        which = "baseline" if reasons[0] else "candidate"
        _say(f"{name}: DIFFERS: it does not run in the {which}: {reasons[0] or reasons[1]}")
        return False
    same = True
    for file, differences in compared(*folders):
        _say(f"{name} {file}: " + (f"DIFFERS: {'; '.join(differences)}" if differences else "equal"))
        same = same and not differences
    return same


def _say(line: str) -> None:
    print(line, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, help="checkout that is right")
    parser.add_argument("candidate", type=Path, help="checkout to judge")
    parser.add_argument("--only", default="*", help="names of experiments, with wildcards, separated by commas")
    parser.add_argument("--keep", type=Path, help="where the baseline's results stay")
    parser.add_argument("--out", type=Path, help="where the candidate's results stay")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time (default 1)")
    args = parser.parse_args(arguments)
    for checkout in (args.baseline, args.candidate):
        if not (checkout / "experiments").is_dir():
            parser.error(f"{checkout} is no checkout: it has no folder experiments")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    checkouts = (args.baseline.resolve(), args.candidate.resolve())
    chosen = names(checkouts, args.only.split(","))
    differing = []
    with tempfile.TemporaryDirectory() as temporary:
        old = (args.keep or Path(temporary) / "baseline").resolve()
        new = (args.out or Path(temporary) / "candidate").resolve()
        for name in chosen:
            shutil.rmtree(new / name, ignore_errors=True)
            if not compare_one(name, checkouts, (old / name, new / name), args.jobs):
                differing.append(name)
    print(f"{len(chosen)} experiments, {len(differing)} differ{': ' if differing else ''}{', '.join(differing)}")
    return 1 if differing or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
