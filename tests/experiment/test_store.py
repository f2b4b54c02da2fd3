"""A finished run is taken up again where, and only where, nothing that changes it has changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fineserve_traces import Trace
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fineserve_sim.cluster import Scenario
from fineserve_sim.cluster.scenario import MeasuredSteps
from fineserve_sim.experiment import load_experiment, run_experiment
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.run.store import key_of
from fineserve_sim.systems import Sharing

SHARED_PREFIX = [
    (
        "{id: B, model: llama-3.1-8b, precision: fp8, share: 3}",
        "{id: B, model: llama-3-8b, precision: W16A16, share: 3}",
    ),
    ("  requests: 60", "  conversations: {shared_tokens: 4096}\n  requests: 60"),
    ("{prompt_tokens: 512, output_tokens: 20}", "{prompt_tokens: 512, output_tokens: 20}"),
    ('systems: [fineserve, "prism*"]', "systems: [flexinfer]"),
    ("ttft: {reference: {system: dedicated, load: isolated, quantile: 0.95}, scale: 4}", "ttft_s: 1.0"),
]


def test_what_is_shared_of_equally_long_prompts_is_another_run(write_file, tmp_path: Path) -> None:
    """4,096 + 512 tokens and 512 + 4,096: the same lengths and times, other prefixes."""
    path = write_file(*SHARED_PREFIX)
    other = [("workload.conversations.shared_tokens", "512"), ("workload.lengths.prompt_tokens", "4096")]
    run_experiment(path, tmp_path / "both", quick=True, jobs=1)
    again = run_experiment(path, tmp_path / "both", quick=True, jobs=1, overrides=other)
    fresh = run_experiment(path, tmp_path / "fresh", quick=True, jobs=1, overrides=other)
    assert json.loads(again.read_text()) == json.loads(fresh.read_text())


# --- laws of the key ----------------------------------------------------------------------------------------------------

HASHES = st.lists(st.lists(st.integers(0, 2), max_size=2).map(tuple), min_size=2, max_size=2).map(tuple)
TRACES = st.builds(
    Trace,
    arrival_s=st.sampled_from([[0.0, 1.0], [0.0, 2.0]]).map(np.array),
    model=st.sampled_from([[0, 0], [0, 1], [1, 0]]).map(np.array),
    prompt_tokens=st.sampled_from([[32, 32], [32, 48]]).map(np.array),
    output_tokens=st.sampled_from([[8, 8], [8, 9]]).map(np.array),
    models=st.sampled_from([("A", "B"), ("B", "A")]),
    source=st.sampled_from(["here", "there"]),
    prefix_hashes=st.none() | HASHES,
    prefix_block_tokens=st.sampled_from([8, 16]),
    prefix_tokens=st.none() | st.just([0, 0]).map(np.array),
    dropped_rows=st.integers(0, 1),
)


def seen(trace: Trace) -> tuple[Any, ...]:
    """All of a trace that a simulation can see."""
    fields = (each.name for each in dataclasses.fields(trace) if each.name not in ("source", "dropped_rows"))
    values = (getattr(trace, name) for name in fields)
    return tuple(tuple(value.tolist()) if isinstance(value, np.ndarray) else value for value in values)


@pytest.fixture(scope="module")
def small() -> Scenario:
    experiment = load_experiment(Path(__file__).parents[2] / "experiments" / "fig13.yaml", quick=True)
    setup = experiment.setup
    run = Run(setup, (), "fineserve", next(iter(setup.loads), None), 1.0, 0, tuple(1.0 for _ in setup.models))
    described = scenario(run)
    steps = replace(described.engine, step_times=MeasuredSteps("steps.parquet", "0"))
    return replace(described, engine=steps, trace=described.trace.head(4))


@given(one=TRACES, other=TRACES)
def test_traces_share_a_key_when_they_are_the_same_requests(small: Scenario, one: Trace, other: Trace) -> None:
    keys = {key_of(replace(small, trace=trace), 0) for trace in (one, other)}
    assert (len(keys) == 1) == (seen(one) == seen(other))


def changed(value: Any) -> Iterator[Any]:
    """``value`` with one thing in it changed, for each thing in it."""
    if isinstance(value, Sharing):
        yield from (
            Sharing(mode="fluid"),
            Sharing(mode="mps", percent={"A": 40}),
            Sharing(mode="mps", percent={"A": 50}),
        )
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from (value.model_copy(update={name: each}) for each in changed(getattr(value, name)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("trace", "log", "tell"):
                yield from (replace(value, **{field.name: each}) for each in changed(getattr(value, field.name)))
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from (type(value)([*value[:place], each, *value[place + 1 :]]) for each in changed(item))
        yield type(value)(value[:-1]) if value else type(value)([1])
    elif isinstance(value, dict):
        yield from ({**value, name: each} for name, item in value.items() for each in changed(item))
        yield {**value, "new": 1}
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    else:
        yield f"{value}, another"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_change_of_a_scenario_gives_another_key(small: Scenario) -> None:
    others = list(changed(small))
    assert len(others) > 50
    keys = [key_of(each, 0) for each in [small, *others]]
    assert len(set(keys)) == len(keys)
    assert key_of(small, 0) != key_of(small, 1)
