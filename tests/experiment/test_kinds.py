"""Experiments on clusters of several kinds of GPU: the file, base limits, prices, what is told of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim import catalog
from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment
from fineserve_sim.experiment.results.cost import by_kind, price_of
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.show.answer import answer_lines
from fineserve_sim.experiment.show.page.build import write_page
from fineserve_sim.experiment.sizing.around import search_around
from fineserve_sim.experiment.sizing.bisection import cheapest_mix, cheapest_pair
from fineserve_sim.experiment.sizing.mixes import kinds_of, size_mixed
from fineserve_sim.experiment.sizing.probe import Goal, Prober, SizingError
from fineserve_sim.experiment.sizing.search import AXES, size, to_take
from fineserve_sim.experiment.sizing.variants import Variant, size_all, variants

WriteFile = Callable[..., Path]
ONE = "cluster: {gpu: h100-sxm, count: 2}"
TWO = "cluster: {nodes: [{gpu: l40s, count: 2}, {gpu: h100-sxm}]}"
INF = float("inf")


def test_nodes_are_numbered_in_the_order_of_the_file(write_file: WriteFile) -> None:
    """Ten L40S fill a node of eight and begin another; an A100 is three slices, which count as one GPU that is bought."""
    nodes = (
        "[{gpu: l40s, count: 10, sharing: time_slice}, {gpu: a100-80gb, mig: [3g.40gb, 2g.20gb, 2g]}, {gpu: h100-sxm}]"
    )
    setup = load_experiment(write_file((ONE, f"cluster: {{nodes: {nodes}, network_bytes_per_s: 5.0e+9}}"))).setup
    assert [gpu.id for gpu in setup.gpus] == list(range(14)) and setup.bought == 12
    assert [gpu.node for gpu in setup.gpus] == [0] * 8 + [1] * 2 + [2] * 3 + [3]
    names = ["l40s"] * 10 + ["a100-80gb 3g", "a100-80gb 2g", "a100-80gb 2g", "h100-sxm"]
    assert [gpu.spec.name for gpu in setup.gpus] == names
    assert [gpu.board for gpu in setup.gpus] == [None] * 10 + [10] * 3 + [None]
    assert {gpu.network_bytes_per_s for gpu in setup.gpus} == {5e9}
    assert [gpu.sharing and gpu.sharing.mode for gpu in setup.gpus] == ["time_slice"] * 10 + [None] * 4
    assert setup.gpu_name == "GPUs (10 l40s, 1 a100-80gb, 1 h100-sxm)"


def test_nodes_of_one_kind_are_what_count_says(write_file: WriteFile) -> None:
    texts = (ONE, "cluster: {nodes: [{gpu: h100-sxm, count: 2}]}")
    plain, nodes = (load_experiment(write_file((ONE, text))).setup for text in texts)
    assert nodes.gpus == plain.gpus and nodes.kinds == plain.kinds and nodes.gpu_name == plain.gpu_name
    twice = load_experiment(write_file((ONE, "cluster: {nodes: [{gpu: h100-sxm}, {gpu: h100-sxm}]}"))).setup
    assert twice.kinds == plain.kinds and [gpu.node for gpu in twice.gpus] == [0, 1]


def test_the_parts_of_a_gpu_are_those_that_fit_together() -> None:
    whole = catalog.gpu("a100-80gb")
    parts = catalog.mig_parts(whole, ["3g.40gb", "1g.10gb", "1g.20gb"])
    assert [part.name for part in parts] == ["a100-80gb 3g", "a100-80gb 1g", "a100-80gb 1g+"]
    assert catalog.mig_parts(whole, ["3g", "3g"]) == catalog.mig_slices(whole, "3g.40gb")
    for profiles, problem in {
        ("3g", "3g", "1g"): "7 of 7 slices of its SMs and 9 of 8 of its memory",
        ("4g", "2g", "2g"): "8 of 7 slices",
        ("4g", "4g"): "has room for 1 slices of 4g, not for 2",
        ("5g",): "has no MIG profile 5g; known: 1g",
        ("3g.80gb",): "has no MIG profile 3g.80gb",
    }.items():
        with pytest.raises(ValueError, match=problem):
            catalog.mig_parts(whole, profiles)


@pytest.mark.parametrize(
    ("cluster", "model", "problem"),
    [
        ("{nodes: [{gpu: l40s}], count: 4}", "", ":3: cluster.count: not with nodes, each of which has its own: cluster."),
        ("{nodes: []}", "", "cluster.nodes: must have at least 1 item"),
        ("{nodes: [{gpu: l40s, cuont: 4}]}", "", 'cluster.nodes.0.cuont: unknown key; did you mean "count"?'),
        ("{nodes: [{gpu: l40s}, {gpu: h100}]}", "", "cluster.nodes.1.gpu: unknown GPU 'h100'"),
        ("{nodes: [{gpu: l40s, mig: [1g]}]}", "", "cluster.nodes.0.mig: unknown GPU with MIG 'l40s'"),
        ("{nodes: [{gpu: h100-sxm, mig: [3g, 3g, 1g]}]}", "", "cluster.nodes.0.mig: 3g + 3g + 1g do not fit on one h100-sxm"),
        ("{nodes: [{gpu: h100-sxm, mig: [3g], sharing: {mig: 1g}}]}", "", "cluster.nodes.0.sharing: divides the GPU by MIG"),
        ("{nodes: [{gpu: l40s}, {gpu: h100-sxm}]}", ", tp: 2", "tp: must be at most the 1 GPUs of one kind of a node, not 2"),
        ("{nodes: [{gpu: l40s}, {gpu: h100-sxm}]}", ", tp: auto", "models.0.tp: auto chooses one degree for all GPUs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_its_line(write_file: WriteFile, cluster: str, model: str, problem: str) -> None:
    path = write_file((ONE, f"cluster: {cluster}"), ("precision: W16A16", f"precision: W16A16{model}"))
    with pytest.raises(ConfigError) as refused:
        load_experiment(path)
    assert problem in str(refused.value)


def test_a_pin_across_kinds_is_refused(write_file: WriteFile) -> None:
    """A node has one kind of GPU, or slices of several."""
    slices = "cluster: {nodes: [{gpu: h100-sxm, count: 2, mig: [3g, 2g]}]}"
    pins = "{base: fineserve, name: pinned, placement: {policy: pinned, groups: {A: [[0]], B: [[0, 1]]}}}"
    path = write_file((ONE, slices), ("[fineserve,", f"[{pins},"))
    with pytest.raises(ConfigError, match="expected 1 different GPUs"):
        load_experiment(path)


def test_base_limits_are_of_the_kind_that_serves_a_model_fastest(write_file: WriteFile) -> None:
    """Whatever stands first in the file, and of those that hold the model: a model of 61 GiB in FP16 needs an A100."""
    path = write_file((ONE, TWO))
    for load in ("isolated", "alone"):
        experiment = load_experiment(path, [("slo.ttft.reference.load", load)])
        run = Run(experiment.setup, (), "dedicated", "A", 1.0, 0, (INF, INF), **{load: "A"})
        assert [(gpu.id, gpu.spec.name) for gpu in scenario(run).gpus] == [(2, "h100-sxm")]
    nodes = json.dumps([{"gpu": "l40s"}, {"gpu": "a100-80gb", "count": 2}])
    experiment = load_experiment(path, [("models.0.model", "qwen2.5-32b"), ("cluster.nodes", nodes)])
    run = Run(experiment.setup, (), "dedicated", "A", 1.0, 0, (INF, INF), alone="A")
    assert [(gpu.id, gpu.spec.name) for gpu in scenario(run).gpus] == [(1, "a100-80gb")]


def test_the_base_is_that_of_the_fast_kind_alone(write_file: WriteFile, tmp_path: Path) -> None:
    """Adding slower GPUs loosens no limit."""
    found = []
    for number, cluster in enumerate((ONE, TWO)):
        out = tmp_path / str(number)
        run_experiment(write_file((ONE, cluster)), out, quick=True, jobs=1)
        found.append(json.loads((out / "summary.json").read_text())["slo"])
    assert found[0] == found[1]


def test_cost_is_the_sum_over_kinds(write_file: WriteFile) -> None:
    listed = catalog.list_prices().usd_per_gpu_hour
    setup = load_experiment(write_file((ONE, TWO))).setup
    assert price_of(setup).usd_per_gpu_hour == pytest.approx((2 * listed["l40s"] + listed["h100-sxm"]) / 3)
    assert price_of(setup).default
    given = load_experiment(write_file((ONE, TWO)), [("cluster.nodes.0.usd_per_gpu_hour", "0.5")]).setup
    assert price_of(given).usd_per_gpu_hour == pytest.approx((2 * 0.5 + listed["h100-sxm"]) / 3)
    assert [(kind["gpu"], kind["count"], kind["usd_per_hour"]) for kind in by_kind(given)] == [
        ("l40s", 2, 1.0),
        ("h100-sxm", 1, listed["h100-sxm"]),
    ]
    unknown = load_experiment(write_file((ONE, TWO)), [("cluster.nodes.0.gpu", "h800")]).setup
    assert price_of(unknown).usd_per_gpu_hour is None


@pytest.fixture
def results(write_file: WriteFile, tmp_path: Path) -> Path:
    pins = "{base: fineserve, name: pinned, title: Pinned, placement: {policy: pinned, groups: {A: [[2]], B: [[1]]}}}"
    path = write_file((ONE, TWO), ('[fineserve, "prism*"]', f"[{pins}]"), ("rate_per_s: 20", "rate_per_s: 2"))
    run_experiment(path, tmp_path / "out", quick=True, jobs=1)
    return tmp_path / "out"


def test_results_tell_of_kinds(results: Path) -> None:
    summary = json.loads((results / "summary.json").read_text())
    cell = summary["cells"][0]
    assert cell["cluster"] == {"gpu": "GPUs (2 l40s, 1 h100-sxm)", "count": 3}
    assert [(gpu["kind"], gpu["models"]) for gpu in cell["gpus"]] == [
        ("l40s", []),
        ("l40s", ["B"]),
        ("h100-sxm", ["A"]),
    ]
    assert sum(kind["usd_per_hour"] for kind in cell["cost_by_kind"]) == pytest.approx(cell["cost"]["usd_per_hour"])
    assert set(summary["step_times"]["tables_of"].split(" and ")) >= {"h100-sxm"}
    lines = "\n".join(answer_lines(summary))
    assert "Pinned on 3 GPUs (2 l40s, 1 h100-sxm)" in lines
    assert f"(l40s ${catalog.list_prices().usd_per_gpu_hour['l40s']:,.2f} a GPU-hour, h100-sxm $" in lines
    write_page([results], results / "report.html")
    page = (results / "report.html").read_text(encoding="utf-8")
    assert "2 × l40s, 1 × h100-sxm" in page and "1 l40s" in page and "Cost by kind of GPU" in page


def test_resolved_files_run_again(results: Path) -> None:
    again = load_experiment(results / "resolved.yaml").setup
    assert [gpu.spec.name for gpu in again.gpus] == ["l40s", "l40s", "h100-sxm"]


def test_the_search_around_an_answer_leaves_the_gpus_as_they_are(results: Path) -> None:
    answer = search_around(results, jobs=1)["answer"]
    assert answer["search"].keys() == {"rate"}
    assert any("holds" in line for line in answer_lines(json.loads((results / "summary.json").read_text())))


def test_size_searches_rates_on_several_kinds_and_numbers_of_one(write_file: WriteFile, tmp_path: Path) -> None:
    path = write_file((ONE, TWO), ('[fineserve, "prism*"]', "[dedicated]"))
    prober = Prober(path, tmp_path / "out", [Goal("ttft_attainment", 0.9)], quick=True, jobs=1)
    with pytest.raises(SizingError, match=r"cluster\.nodes: size finds a number of GPUs of one kind; give --gpu"):
        list(size(prober, AXES["gpus"]))
    (answer,) = size(prober, AXES["rate"], precision=0.5)
    assert answer.best is not None and answer.gpu == "GPUs (2 l40s, 1 h100-sxm)"
    one = Variant("l40s").of(prober).file().setup
    assert one.gpu_name == "l40s" and one.bought == 3


@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.tuples(st.sampled_from([1.0, 2.5, 3.49]), st.sampled_from([1.0, 1.09, 4.0])),
    st.integers(2, 9),
    st.sampled_from([4.0, 8.5, 100.0]),
)
def test_the_cheapest_pair_is_that_of_all_pairs(
    needed: list[int], costs: tuple[float, float], most: int, below: float
) -> None:
    """By how many of the first there are, so many of the second are needed: the fewer, the more."""
    stairs, asked = sorted(needed, reverse=True), []

    def holds(first: int, second: int) -> bool:
        asked.append((first, second))
        return second >= stairs[first - 1]

    def cost(pair: tuple[int, int]) -> float:
        return pair[0] * costs[0] + pair[1] * costs[1]

    pairs = [(first, second) for first in range(1, most) for second in range(1, most - first + 1)]
    holding = [pair for pair in pairs if pair[1] >= stairs[pair[0] - 1] and cost(pair) < below]
    found = cheapest_pair(costs, (most, most), below, holds, together=most)
    assert (found is None) == (not holding)
    assert found is None or (found in holding and cost(found) == min(map(cost, holding)))
    assert len(asked) == len(set(asked)) < 2 * most


@given(
    st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=4),
    st.tuples(*[st.sampled_from([1.0, 2.5, 3.49])] * 3),
    st.sampled_from([7.0, 12.5, 100.0]),
)
def test_the_cheapest_mix_of_three_is_that_of_all(
    enough: list[tuple[int, ...]], costs: tuple[float, ...], below: float
) -> None:
    """A mix holds that has at least what one of those has that are enough."""
    most, asked = (4, 3, 4), []

    def at_least(mix: tuple[int, ...]) -> bool:
        return any(all(map(int.__ge__, mix, each)) for each in enough)

    def holds(*mix: int) -> bool:
        asked.append(mix)
        return at_least(mix)

    def cost(mix: tuple[int, ...]) -> float:
        return sum(map(float.__mul__, costs, map(float, mix)))

    holding = [mix for mix in product(*(range(1, count + 1) for count in most)) if at_least(mix) and cost(mix) < below]
    found = cheapest_mix(costs, most, below, holds)
    assert (found is None) == (not holding)
    assert found is None or cost(found) == pytest.approx(min(map(cost, holding)))
    assert len(asked) == len(set(asked)) <= (most[0] + most[1]) * most[2]


def test_size_finds_the_cheapest_mix(write_file: WriteFile, tmp_path: Path) -> None:
    """Each model has a GPU of its own. The tight limit of A asks for an H100, B does with an L40S: two H100s would keep both,
    L40S none."""
    path = write_file(
        (ONE, "cluster: {gpu: h100-sxm, count: 2, gpus_per_node: 4}"),
        ("share: 2", "share: 2, ttft_slo_s: 0.03"),
        ("share: 3", "share: 3, ttft_slo_s: 0.15"),
        ('[fineserve, "prism*"]', "[dedicated]"),
        ("rate_per_s: 20", "rate_per_s: 1"),
    )
    prober = Prober(path, tmp_path / "out", [Goal("ttft_attainment", 0.9)], quick=True, jobs=1)
    gpus, axis = ["h100-sxm", "l40s"], AXES["gpus"]
    found = list(size_all(prober, variants(gpus, [], {}), axis, most_gpus=3, precision=0.1))
    assert [answer.best and answer.best.value for answer, _ in found] == [2, None]
    ((mixed, own),) = size_mixed(prober, found, kinds_of(gpus, {"l40s": 1.0}, axis), [], most_gpus=3)
    assert mixed.gpu == "GPUs (1 h100-sxm, 1 l40s)" and mixed.best is not None and mixed.best.value == 2
    assert mixed.best.usd_per_hour == pytest.approx(1.0 + catalog.list_prices().usd_per_gpu_hour["h100-sxm"])
    assert to_take([*(answer for answer, _ in found), mixed], axis) is mixed
    assert own.experiment("dedicated", axis.key, 2).setup.gpu_name == mixed.gpu
    dear = kinds_of(gpus, {"l40s": 5.0}, axis)
    assert not list(size_mixed(prober, found, dear, [], most_gpus=3))
    with pytest.raises(SizingError, match="--mix: needs"):
        kinds_of(gpus[:1], {}, axis)
