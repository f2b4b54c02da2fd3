"""A plan in time against one plan and residencies that follow the load: ServeGen's clients of ``plan_matrix.yaml``, 8,000
requests at 30 a second on four H100, eight windows. Some minutes of one core."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.plan_matrix import wish_of
from fineserve_sim.planning.in_time import RIVALS, planned
from fineserve_sim.planning.make import Wish

SITUATION, REQUESTS, EVERY_S = "servegen-8-4", 8000, 34.0


def drifting(data: Path, folder: Path) -> Wish:
    """The situation with more requests, each model in one precision: 32B in FP8, which leaves room beside it."""
    matrix = yaml.safe_load(Path(__file__).with_name("plan_matrix.yaml").read_text(encoding="utf-8"))
    situation = next(each for each in matrix["situations"] if each["name"] == SITUATION)
    wish = wish_of(situation | {"requests": REQUESTS}, data, folder)
    return replace(wish, models=tuple(replace(model, options=model.options[-1:]) for model in wish.models))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/")
    parser.add_argument("--evaluations", type=int, default=225, help="islands that are simulated in all")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = planned(drifting(arguments.data, Path(folder)), EVERY_S, evaluations=arguments.evaluations)
    print(f"plan in time: {100 * found.on_time:.1f} %")
    for name, (share, half_width) in zip(RIVALS, found.rivals, strict=True):
        print(f"{name}: {100 * share:.1f} % ± {100 * half_width:.1f}")
    for window in found.windows:
        print(f"  from {window.from_s:.0f} s: {window.came} engines, {window.moved_bytes / 1e9:.0f} GB")


if __name__ == "__main__":
    main()
