"""How GPUs are shared, in files: words, GPU by GPU, slices, and what refuses to share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fineserve_sim.cluster import RunResult, ScenarioError, simulate
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.systems import Sharing, load_systems

WriteFile = Callable[..., Path]


def experiment(write_file: WriteFile, sharing: str = "", *more: tuple[str, str]) -> Experiment:
    said = f", sharing: {sharing}" if sharing else ""
    return load_experiment(write_file(("count: 2", f"count: 1{said}"), *more))


def run(found: Experiment, system: str = "fineserve") -> RunResult:
    described = scenario(Run(found.setup, (), system, "A", 2.0, 0, tuple(1.0 for _ in found.setup.models)))
    return simulate(described)


@pytest.mark.parametrize(
    "words",
    [
        "exclusive",
        "fluid",
        "time_slice",
        "in_turn",
        "mps",
        {"mps": {"A": 50}},
        {"mps": "by_rate"},
        {"mig": "3g"},
    ],
)
def test_words_come_back_as_they_were(words: Any) -> None:
    assert Sharing.model_validate(words).model_dump() == words


@pytest.mark.parametrize(
    "words",
    ["mig", "MPS", {"mps": {"A": 0}}, {"mig": 3}, {"mps": {}, "mig": "3g"}, {"in_turn": 0.1}, 5, {}],
)
def test_other_words_are_refused(words: Any) -> None:
    with pytest.raises(ValidationError):
        Sharing.model_validate(words)


def test_systems_say_how_they_share() -> None:
    """FineServe and Prism by MPS at 100 %, MuxServe with percentages; a dedicated GPU is for one."""
    words = {name: system.sharing.model_dump() for name, system in load_systems().items()}
    assert {words[name] for name in ("fineserve", "prism", "prism*", "static*", "s-partition", "muxserve++")} == {"mps"}
    assert words["muxserve"] == {"mps": "by_rate"}
    assert words["dedicated"] == "exclusive"


def test_the_cluster_has_the_last_word(write_file: WriteFile) -> None:
    """Decodes of two models on a GPU take longest where they take turns."""
    end_s = {
        mode: np.nanmean(run(experiment(write_file, mode)).finish_s) for mode in ("", "mps", "fluid", "time_slice")
    }
    assert end_s[""] == end_s["mps"]
    assert end_s["mps"] < end_s["time_slice"]
    assert end_s["fluid"] < end_s["time_slice"]


def test_each_gpu_may_have_its_own(write_file: WriteFile) -> None:
    found = load_experiment(write_file(("count: 2", "count: 2, sharing: [time_slice, {mig: 3g}]")))
    assert [str(gpu.sharing) for gpu in found.setup.gpus] == ["time_slice", "mig 3g", "mig 3g"]
    assert [gpu.id for gpu in found.setup.gpus] == [0, 1, 2]


def test_a_cap_slows_down_an_engine_that_is_alone(write_file: WriteFile) -> None:
    first_s = {
        percent: np.nanmean(run(experiment(write_file, f"{{mps: {{A: {percent}, B: {percent}}}}}")).first_token_s)
        for percent in (100, 60, 20)
    }
    assert first_s[100] < first_s[60] < first_s[20]


def test_exclusive_refuses_a_second_engine(write_file: WriteFile) -> None:
    with pytest.raises(
        ScenarioError, match="system fineserve puts A and B on GPU 0, whose sharing is exclusive; share it"
    ):
        run(experiment(write_file, "exclusive"))
    with pytest.raises(ScenarioError, match="system prism brings several models to a GPU"):
        run(experiment(write_file, "exclusive", ('"prism*"', "prism")), "prism")


def test_slices_are_gpus_that_share_nothing(write_file: WriteFile) -> None:
    """Two 3g slices of an H100: 60 of 132 SMs, half of memory and bandwidth each; a model in each has it to itself."""
    found = experiment(write_file, "{mig: 3g}")
    first, second = (gpu.spec for gpu in found.setup.gpus)
    assert first == second
    assert (first.name, first.memory_gib, first.whole) == ("h100-sxm 3g", 40.0, "h100-sxm")
    result = run(found)
    assert sorted(gpu for instance in result.placement.instances for gpu in instance.gpus) == [0, 1]
    whole = run(experiment(write_file, "mps"))
    assert np.nanmin(result.first_token_s) > np.nanmin(whole.first_token_s)  # on fewer SMs
