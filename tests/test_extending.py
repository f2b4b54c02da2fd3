"""docs/extending.md says how to add a system and a policy: its files, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fineserve_sim.cluster.compose.policies import register_placement, register_scheduler
from fineserve_sim.experiment import load_experiment, run_experiment
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.figures import draw
from fineserve_sim.systems import SystemSpec, load_systems
from fineserve_sim.systems.spec import FcfsSpec, Spec

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
EXPERIMENT, SYSTEM = (body for language, body in BLOCKS if language == "yaml")
(POLICY,) = (body for language, body in BLOCKS if language == "python")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page under the names that it gives them."""
    (tmp_path / "two_models.yaml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "shortest.py").write_text(POLICY, encoding="utf-8")
    return tmp_path


def attainment(summary: dict[str, Any]) -> dict[str, float]:
    return {cell["system"]: cell["metrics"]["ttft_attainment"]["mean"] for cell in summary["cells"]}


def test_the_new_system_is_one_file(folder: Path) -> None:
    """And figures of timelines leave out the bound, which has no engines."""
    figures = '[{"name": "memory", "timeline": {}, "panels": ["kv_used_bytes"]}]'
    run_experiment(folder / "two_models.yaml", folder / "out", jobs=1, overrides=[("figures", figures)])
    reached = attainment(read_summary(folder / "out"))
    assert set(reached) == {"fineserve", "clairvoyant", "mixed"}
    assert max(reached["mixed"], reached["fineserve"]) <= reached["clairvoyant"] < 1
    assert f"more than {reached['clairvoyant']:.0%}".replace("%", " %") in PAGE
    drawn = draw(folder / "out")
    picture = next(path for path in drawn if path.suffix == ".svg").read_text(encoding="utf-8")
    assert "Mixed" in picture and "Clairvoyant" not in picture


def test_the_file_beside_the_built_in_ones_means_the_same(folder: Path) -> None:
    system = SystemSpec.model_validate(yaml.safe_load(SYSTEM))
    assert system.name not in load_systems()
    inline = load_experiment(folder / "two_models.yaml").setup.systems[system.name]
    assert inline == system.model_copy(update={"summary": inline.summary})


@pytest.mark.slow
def test_the_new_policy_runs_as_shown(folder: Path) -> None:
    """In the processes that ``run_experiment`` starts, too. The page gives the percentages."""
    program = folder / "shortest.py"
    done = subprocess.run(
        [sys.executable, str(program)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == Path("results/shortest/summary.json")
    reached = attainment(read_summary(folder / "results" / "shortest"))
    percent = {system: round(100 * share) for system, share in reached.items()}
    assert percent == {"fineserve": 96, "shortest": 95, "static*": 49}
    assert all(f"{number} %" in PAGE for number in percent.values())


KEYS = """
import json, sys
from pathlib import Path
sys.argv = ["fineserve-sim"]
import policies
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.run.run import Run
from fineserve_sim.experiment.run.work import keyed

axes = '"scheduler": {"policy": "shortest"}'
systems = '["static*", {"base": "static*", "name": "own", ' + axes + "}]"
found = load_experiment(Path("two_models.yaml"), [("systems", systems)])
print(json.dumps([keyed(Run(found.setup, (), name, None, 1.0, 0, (1.0, 1.0))) for name in ("static*", "own")]))
"""
REGISTERS = """
from shortest import BATCH, Shortest, ShortestSpec
from fineserve_sim.cluster.compose.policies import register_scheduler
register_scheduler(ShortestSpec, lambda spec, sheets: Shortest(BATCH))
"""


@pytest.mark.slow
def test_a_policy_that_changes_is_simulated_again(folder: Path) -> None:
    """Though another module registers it. Runs of our own policies keep their names."""
    policy = POLICY.partition("register_scheduler(Shortest")[0] + "BATCH = 2048\n"
    (folder / "policies.py").write_text(REGISTERS, encoding="utf-8")

    def keys(source: str) -> list[str]:
        (folder / "shortest.py").write_text(source, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-B", "-c", KEYS], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    first, again = keys(policy), keys(policy)
    assert first == again
    ours, own = keys(policy.replace("(request.prompt_tokens, ", "(-request.prompt_tokens, "))
    assert ours == first[0] and own != first[1]
    assert keys(policy.replace("BATCH = 2048", "BATCH = 1024"))[1] not in (first[1], own)


AFTER = """
import json, sys
sys.argv = ["fineserve-sim"]
import shortest
from pathlib import Path
from fineserve_sim.cli.policies import policies
from fineserve_sim.cluster import simulate, simulate_step_by_step
from fineserve_sim.cluster.compose.policies import register_placement, register_scheduler
from fineserve_sim.experiment import load_experiment, run_experiment
from fineserve_sim.policy.placement.static import DedicatedPlacement
from typing import Literal

class Mine(shortest.Spec):
    policy: Literal["mine"] = "mine"

register_placement(Mine, lambda spec: DedicatedPlacement())
axes = '"placement": {"policy": "mine"}, "scheduler": {"policy": "shortest", "batch_tokens": 512}'
systems = '[{"base": "static*", "name": "s", ' + axes + "}]"
overrides = [("systems", systems), ("workload.requests", "60"), ("cluster.count", "2")]
written = [
    run_experiment(Path("two_models.yaml"), Path(name), overrides=overrides, jobs=1, simulate=run).read_text()
    for name, run in (("merged", simulate), ("plain", simulate_step_by_step))
]
try:
    register_scheduler(shortest.ShortestSpec, None)
except ValueError as problem:
    refused = str(problem)
try:
    load_experiment(Path("two_models.yaml"), [("systems", systems.replace("batch_tokens", "batch"))])
except ValueError as problem:
    hinted = str(problem)
known = [(policy.axis, policy.name, [option.name for option in policy.options]) for policy in policies()]
print(json.dumps([known, written[0] == written[1], refused, hinted]))
"""


def test_a_registered_policy_is_like_ours(folder: Path) -> None:
    """Listed with its options, checked like others, exact under merged steps; its name is taken then."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    known, same, refused, hinted = json.loads(done.stdout)
    assert ["scheduler", "shortest", ["batch_tokens"]] in known and ["placement", "mine", []] in known
    assert same
    assert refused == "a scheduler policy is called shortest already: choose another name"
    assert "unknown option of shortest" in hinted and "batch_tokens" in hinted


def test_a_policy_without_a_name_of_its_own_is_refused() -> None:
    class Nameless(Spec):
        """No policy field."""

    with pytest.raises(ValueError, match=r'Nameless has no name: give it a field policy: Literal\["NAME"\]'):
        register_scheduler(Nameless, lambda spec, sheets: None)
    with pytest.raises(ValueError, match="a scheduler policy is called fcfs already"):
        register_scheduler(FcfsSpec, lambda spec, sheets: None)
    with pytest.raises(ValueError, match="Nameless has no name"):
        register_placement(Nameless, lambda spec: None)  # type: ignore[arg-type,return-value]
