"""Systems are data: every file loads, and the composed FineServe places the models of the paper's Table 4 as it does."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import yaml
from fineserve_traces import Trace
from pydantic import TypeAdapter, ValidationError

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cli.policies import policies
from fineserve_sim.cluster import Fate, Gpu, Scenario, ServedModel, simulate
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.experiment.reproduce.readings import system_read_as
from fineserve_sim.policy.groups.dispatch import LlumnixMigration
from fineserve_sim.policy.groups.drop_plan import KunServeDrop
from fineserve_sim.policy.placement.fineserve import FineServePlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson
from fineserve_sim.systems import OpenReading, SystemSpec, load_systems, open_readings
from fineserve_sim.systems import spec as specs

ROOT = Path(__file__).parents[1]
FILES = sorted(
    (f for f in files("fineserve_sim.systems").iterdir() if f.name.endswith(".yaml") and f.name != "readings.yaml"),
    key=lambda f: f.name,
)
OPTIONS = {
    (policy.axis, policy.name, option.name): option.default for policy in policies() for option in policy.options
}
CHOICES_OF_A_USER = {
    "scheduler.clairvoyant.engines",
    "memory.vtensor.chunk_bytes",
    "memory.vtensor.extend",
    "residency.timetable.entries",
    *(f"residency.{policy}.{name}" for policy in ("drifting", "timetable") for name in ("tick_s", "engine_start_s")),
    *(f"residency.{policy}.{name}" for policy in ("prism", "drifting", "timetable") for name in ("loader", "sleep")),
}
"""Options that no shipped file sets and no paper leaves open: another bound, a smaller world for tests, a what-if, a plan in
time, what an engine takes to come."""


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_each_file_is_a_system_named_like_it(file: object) -> None:
    spec = SystemSpec.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))  # type: ignore[attr-defined]
    assert spec.name.replace("*", "_star") + ".yaml" == file.name  # type: ignore[attr-defined]
    assert spec.title and spec.summary
    assert load_systems()[spec.name] == spec


def test_names_are_unique_and_the_matrix_is_there() -> None:
    assert len(load_systems()) == len(FILES)
    assert set(load_systems()) >= {"fineserve", "prism*", "static*", "dedicated"}


def test_systems_combine_the_policies_of_the_matrix() -> None:
    """systems.md 0: placement, scheduling and memory of each."""
    axes = {
        name: (spec.placement.policy, spec.scheduler.policy, spec.memory.policy)
        for name, spec in load_systems().items()
    }
    assert axes["fineserve"] == ("fineserve", "adaptive", "kv_slab")
    assert axes["prism*"] == ("kvpr", "moore_hodgson", "kv_slab")
    assert axes["static*"] == ("fineserve", "fcfs", "private")
    assert axes["dedicated"] == ("dedicated", "fcfs", "private")
    assert axes["kvcached"] == ("fineserve", "adaptive", "kvcached")
    assert axes["flexinfer"] == ("dedicated", "fcfs", "vtensor")
    assert axes["native"] == ("dedicated", "fcfs", "contiguous")
    assert axes["vllm-v0.4.2"] == ("dedicated", "fcfs", "private")


@pytest.mark.parametrize(
    ("chosen", "readings"),
    [
        (specs.MooreHodgsonSpec(), {"late_start": "after_all"}),
        (specs.KunServeDropSpec(), {"required": "gross", "restore_usage": "cluster"}),
        (specs.PipelineSpec(), {"queues": "shared"}),
    ],
)
def test_readings_of_what_papers_leave_open_are_defaults(chosen: specs.Spec, readings: dict[str, str]) -> None:
    assert chosen.model_dump(include=set(readings)) == readings


@pytest.mark.parametrize("reading", open_readings(), ids=lambda reading: reading.option)
def test_open_readings_are_options_and_begin_with_the_default(reading: OpenReading) -> None:
    axis, policy, option = reading.option.split(".")
    assert reading.values[0] == (policy if option == "policy" else OPTIONS[axis, policy, option])
    assert len(set(reading.values)) == len(reading.values)
    for each in (reading.option, *reading.also):
        axis, policy, option = each.split(".")
        field = TypeAdapter(SystemSpec.model_fields[axis].annotation)
        for value in reading.values:
            assert getattr(field.validate_python({"policy": policy} | {option: value}), option) == value


@pytest.mark.parametrize("name", ["prism*", "static*", "fineserve"])
def test_the_systems_of_fineserves_figures_replicate_alike(name: str) -> None:
    """ "DP replicas are treated as independent model instances" (section 6.2), whoever places them."""
    assert load_systems()[name].placement.replicas == "slo"  # type: ignore[union-attr]


def test_options_that_nothing_shipped_sets_are_open_readings() -> None:
    """What one text settles is a constant: an option is set by a system or an experiment, or open."""
    shipped = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "experiments").glob("*.yaml"))
    shipped += "".join(file.read_text(encoding="utf-8") for file in FILES)  # type: ignore[attr-defined]
    unset = {".".join(key) for key in OPTIONS if not re.search(rf"\b{key[2]}: ", shipped)}
    assert unset - CHOICES_OF_A_USER <= {reading.option for reading in open_readings()}
    assert {".".join(key) for key in OPTIONS} >= CHOICES_OF_A_USER


@pytest.mark.parametrize(
    ("axis", "options", "gone"),
    [
        ("memory", {"policy": "kv_slab", "reserved_slabs": 1}, "reserved_slabs"),
        ("memory", {"policy": "kvcached", "min_reserved": 5}, "min_reserved"),
        ("memory", {"policy": "kvcached", "max_reserved": 10}, "max_reserved"),
        ("residency", {"policy": "prism", "rate_window_s": 60.0}, "rate_window_s"),
        ("residency", {"policy": "qlm", "seed": 0}, "seed"),
        ("drop", {"policy": "kunserve_drop", "restore_below": 0.5}, "restore_below"),
        ("drop", {"policy": "kunserve_drop", "remap_s": 0.005}, "remap_s"),
    ],
)
def test_what_a_text_settles_is_no_option(axis: str, options: dict[str, object], gone: str) -> None:
    fields = load_systems()["kunserve"].model_dump()
    with pytest.raises(ValidationError, match=gone) as caught:
        SystemSpec.model_validate({**fields, axis: options})
    assert {error["type"] for error in caught.value.errors()} == {"extra_forbidden"}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (specs.FineServePlacementSpec, FineServePlacement),
        (specs.KvprPlacementSpec, KvprPlacement),
        (specs.AdaptiveSpec, AdaptiveBatching),
        (specs.MooreHodgsonSpec, MooreHodgson),
        (specs.KunServeDropSpec, KunServeDrop),
        (specs.LlumnixMigrationSpec, LlumnixMigration),
    ],
)
def test_who_builds_a_policy_gets_the_defaults_of_its_spec(options: type[specs.Spec], policy: type) -> None:
    by_class = {name: each.default for name, each in signature(policy).parameters.items()}
    by_spec = {name: each.default for name, each in options.model_fields.items() if name in by_class}
    assert by_spec and by_spec == {name: by_class[name] for name in by_spec}


def test_the_microbatches_of_an_engine_share_their_queue_by_default() -> None:
    assert signature(Engine).parameters["shared_queue"].default is (specs.PipelineSpec().queues == "shared")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scheduler": {"policy": "fifo"}}, "fifo"),
        ({"memory": {"policy": "kv_slab", "slab_bytes": 1}}, "slab_bytes"),
        ({"placement": {"policy": "fineserve", "score": "median"}}, "score"),
        ({"extra": 1}, "extra"),
        ({"residency": {"policy": "prism"}, "placement": {"policy": "kvpr", "replicas": "slo"}}, "needs replicas one"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(change: dict[str, object], named: str) -> None:
    fields = load_systems()["fineserve"].model_dump()
    with pytest.raises(ValidationError, match=named):
        SystemSpec.model_validate({**fields, **change})


def scenario(name: str, rate_per_s: float = 1.0) -> Scenario:
    """Table 4 of FineServe: A, B and C on two H100s."""

    def served(id: str, geometry: str, fmt: str) -> ServedModel:
        return ServedModel(id, model(geometry), precision(fmt), 1, rate_per_s, 10.0, 220, 190)

    models = (
        served("A", "llama-3.1-8b", "W16A16"),
        served("B", "llama-3.1-8b", "W8A8KV8"),
        served("C", "llama-3.1-70b", "W4A16"),
    )
    trace = Trace(
        arrival_s=np.array([0.0, 0.0, 0.0]),
        model=np.arange(3, dtype=np.int32),
        prompt_tokens=np.full(3, 50),
        output_tokens=np.full(3, 5),
        models=("A", "B", "C"),
        source="test",
    )
    spec = gpu("h100-sxm")
    return Scenario(load_systems()[name], models, (Gpu(0, 0, spec), Gpu(1, 0, spec)), trace)


def test_table_4_fineserve_puts_both_small_models_beside_each_other() -> None:
    """C goes first (the largest footprint) to GPU 0; A is better off alone on GPU 1; B gains most where A is."""
    placement, demands = place(scenario("fineserve"), demands_of(scenario("fineserve")))
    assert [(instance.model, instance.gpus) for instance in placement.instances] == [
        ("C", (0,)),
        ("A", (1,)),
        ("B", (1,)),
    ]
    assert placement.unplaced == placement.infeasible == ()
    slope = {id: demand.mme_tokens_per_byte for id, demand in demands.items()}
    assert slope["B"] > 1.5 * slope["A"] > slope["C"] > 0  # measured: FP8 tokens are half as large
    per_gib = {id: 2**30 * value for id, value in slope.items()}
    assert per_gib["A"] == pytest.approx(
        2**30 / demands["A"].token_bytes, rel=0.25
    )  # one more token an own size, about


def test_table_4_static_places_as_fineserve_does() -> None:
    static, fineserve = scenario("static*"), scenario("fineserve")
    placed, _ = place(fineserve, demands_of(fineserve))
    assert place(static, demands_of(static))[0].instances == placed.instances


@pytest.mark.parametrize("name", ["fineserve", "prism*", "static*"])
def test_every_system_serves_table_4(name: str) -> None:
    run = simulate(scenario(name))
    assert (run.fate == Fate.FINISHED).all()


@pytest.mark.parametrize("name", sorted(load_systems()))
def test_every_system_runs_under_every_open_reading(name: str) -> None:
    """An option may be refused beside another one's default."""
    system = load_systems()[name]
    several = scenario("fineserve")
    rows = np.zeros(3, dtype=np.int32)
    one = replace(several, models=several.models[:1], trace=replace(several.whole_trace, model=rows, models=("A",)))
    base = several if system.dispatch is None else one
    for reading in open_readings():
        for value in reading.values[1:]:
            read = system_read_as(system, reading, value)
            if read is not system:
                simulate(replace(base, system=read, sample_s=0.0))


def test_dedicated_turns_away_the_model_for_which_no_gpu_is_left() -> None:
    run = simulate(scenario("dedicated"))
    assert run.placement.unplaced == ("B",)
    assert run.fate.tolist() == [Fate.FINISHED, Fate.REJECTED, Fate.FINISHED]
