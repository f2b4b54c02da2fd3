"""Where everything is: bytes add up, models without a place say why, tables and summary agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.results.places import Places, mean_over_seeds
from fineserve_sim.experiment.show.answer import answer_lines

CROWD = """\
fineserve: 1
title: Four models on one or two GPUs
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: big, model: qwen3-32b, precision: fp16, rate_per_s: 1}
  - {id: mid, model: qwen2.5-14b, precision: fp16, rate_per_s: 1}
  - {id: small, model: llama-3.2-1b, precision: fp16, rate_per_s: 4}
workload: {lengths: {prompt_tokens: 512, output_tokens: 8}, requests: 60}
slo: {ttft_s: 0.5, tpot_s: 0.05, e2e_s: 5.0}
systems: [fineserve, clairvoyant]
sweeps: [{name: gpus, axes: {cluster.count: [1, 2]}}]
seeds: 2
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowd")
    (folder / "crowd.yaml").write_text(CROWD, encoding="utf-8")
    run_experiment(folder / "crowd.yaml", folder / "out", jobs=1)
    return folder / "out"


@pytest.fixture(scope="module")
def summary(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def cell(summary: Any, system: str, gpus: int) -> Any:
    return next(c for c in summary["cells"] if c["system"] == system and c["axes"]["cluster.count"] == gpus)


def test_misses_of_the_models_add_up_to_those_of_the_cell(summary: Any) -> None:
    for found in summary["cells"]:
        assert list(found["misses"]) == list(CAUSES)
        for cause, count in found["misses"].items():
            assert sum(model["misses"][cause] for model in found["models"].values()) == count
        within = found["metrics"]["slo_attainment"]["mean"] * found["requests"]
        assert sum(found["misses"].values()) == pytest.approx(found["requests"] - within)
        assert sum(model["requests"] for model in found["models"].values()) == found["requests"]


def test_a_model_without_a_gpu_is_named_with_the_reason_and_its_requests_are_its_misses(summary: Any) -> None:
    crowded = cell(summary, "fineserve", 1)
    assert crowded["unplaced"]
    for entry in crowded["unplaced"]:
        model = crowded["models"][entry["model"]]
        assert model["misses"]["unplaced"] == model["requests"] and model["instances"] == []
        assert "of the 3 models needs" in entry["why"] and "1 GPU has 71.3 GiB" in entry["why"]
    assert crowded["misses"]["rejected"] == 0
    roomy = cell(summary, "fineserve", 2)
    placed = [name for name, model in roomy["models"].items() if model["instances"]]
    assert {*placed, *(entry["model"] for entry in roomy["unplaced"])} == {"big", "mid", "small"}


TOO_LARGE = """\
fineserve: 1
title: A model whose footprint FineServe finds no room for, though its engine would fit
cluster: {gpu: h100-sxm, count: 1}
models: [{id: big, model: qwen2.5-32b, precision: fp16, rate_per_s: 0.02}]
workload: {lengths: {prompt_tokens: 1000, output_tokens: 24000}, requests: 3}
slo: {ttft_s: 5}
systems: [fineserve, clairvoyant]
seeds: 1
"""


@pytest.mark.slow
def test_a_cluster_on_which_no_model_has_a_place_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text(TOO_LARGE, encoding="utf-8")
    run_experiment(tmp_path / "big.yaml", tmp_path / "out", jobs=1)
    found, bound = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    assert found["misses"]["unplaced"] == found["requests"] == 3
    assert [entry["model"] for entry in found["unplaced"]] == ["big"]
    assert [(gpu["gpu"], gpu["models"]) for gpu in found["gpus"]] == [(0, [])] and bound["gpus"] == []


def test_gpus_tell_models_memory_and_time(summary: Any) -> None:
    for gpus in (1, 2):
        found = cell(summary, "fineserve", gpus)
        assert [gpu["gpu"] for gpu in found["gpus"]] == list(range(gpus))
        for gpu in found["gpus"]:
            assert all([gpu["gpu"]] in found["models"][name]["instances"] for name in gpu["models"])
            assert gpu["weights_bytes"] + gpu["kv_bytes"] <= gpu["usable_bytes"]
            assert 0 <= gpu["kv_least_bytes"] <= gpu["kv_left_bytes"] <= gpu["kv_bytes"]
            assert 0 < gpu["busy"] <= 1 and 0 < gpu["bandwidth"] <= 1
    assert cell(summary, "clairvoyant", 1)["gpus"] == []  # a bound has no places


def test_tables_hold_what_the_summary_sums_up(out: Path, summary: Any) -> None:
    models = pq.read_table(out / "models.parquet").to_pylist()
    crowded = cell(summary, "fineserve", 1)
    own = [row for row in models if row["system"] == "fineserve" and row["cluster.count"] == "1"]
    assert {row["seed"] for row in own} == {0, 1} and len(own) == 6
    for name, model in crowded["models"].items():
        rows = [row for row in own if row["model"] == name]
        assert sum(row["requests"] for row in rows) == model["requests"]
        assert sum(row["missed_unplaced"] for row in rows) == model["misses"]["unplaced"]
        assert {row["ttft_slo_s"] for row in rows} == {0.5} and {row["e2e_slo_s"] for row in rows} == {5.0}
    requests = pq.read_table(out / "requests.parquet")
    missed = requests.filter(requests.column("measured")).column("miss").to_pylist()
    assert sum(map(bool, missed)) == sum(sum(found["misses"].values()) for found in summary["cells"])
    gpus = pq.read_table(out / "gpus.parquet").to_pylist()
    assert len(gpus) == 2 * (1 + 2) and {row["system"] for row in gpus} == {"fineserve"}
    placements = pq.read_table(out / "placements.parquet").to_pylist()
    homeless = {row["model"] for row in placements if row["gpu"] is None and row["cluster.count"] == "1"}
    assert homeless == {entry["model"] for entry in crowded["unplaced"]}


def test_why_a_model_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "crowd.yaml").write_text(CROWD.replace("count: 1", "count: 3"), encoding="utf-8")
    setup = load_experiment(tmp_path / "crowd.yaml").setup

    def why(*instances: tuple[str, int]) -> str:
        placed = [{"model": model, "replica": at, "gpus": [gpu]} for at, (model, gpu) in enumerate(instances)]
        (entry,) = Places(setup, {"instances": placed, "unplaced": ["mid"]}).unplaced()
        return entry["why"]

    replicas = why(("big", 0), ("big", 1), ("big", 2))
    assert replicas.startswith("it needs 2") and replicas.endswith("after the placement's 3 of big")
    assert why(("big", 0)).endswith("too little with the KV memory that the placement wants")


def test_means_over_seeds_keep_what_is_no_number() -> None:
    one = {"gpu": 0, "node": 0, "models": ["A"], "kv_left_bytes": 10, "busy": 0.5, "kv_least_bytes": None}
    (merged,) = mean_over_seeds([[one], [one | {"models": ["B"], "kv_left_bytes": 21, "busy": 1.0}]])
    assert merged == one | {"kv_left_bytes": 15, "busy": 0.75}


def test_a_seed_without_a_sample_in_its_window_leaves_the_means_to_the_others() -> None:
    """A window of a second may lie between two samples."""
    one = {"gpu": 0, "node": 0, "models": ["A"], "kv_left_bytes": 10, "kv_least_bytes": 5}
    unseen = one | {"kv_left_bytes": None, "kv_least_bytes": None}
    assert mean_over_seeds([[one], [unseen]]) == mean_over_seeds([[unseen], [one]]) == [one]
    assert mean_over_seeds([[unseen], [unseen]]) == [unseen]


SPLIT = """\
fineserve: 1
title: A model over two GPUs beside one on each
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: big, model: llama-3.1-70b, precision: fp8, tp: auto, rate_per_s: 1}
  - {id: left, model: qwen2.5-14b, precision: fp8, rate_per_s: 2}
  - {id: right, model: llama-3.1-8b, precision: fp8, rate_per_s: 2}
workload: {lengths: {prompt_tokens: 512, output_tokens: 8}, requests: 30}
slo: {ttft_s: 2.0}
systems: [fineserve]
seeds: 1
"""


def test_a_model_whose_degree_the_placement_chose_takes_its_part_of_each_gpu(tmp_path: Path) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT, encoding="utf-8")
    setup = load_experiment(tmp_path / "split.yaml").setup
    where = {"big": [0, 1], "left": [0], "right": [1]}
    instances = [{"model": model, "replica": 0, "gpus": gpus} for model, gpus in where.items()]
    places = Places(setup, {"instances": instances, "unplaced": []})
    assert places.weight_bytes("big", 2) == pytest.approx(places.weight_bytes("big") / 2, rel=0.02)
    for gpu, other in zip(places.gpus([], []), ("left", "right"), strict=True):
        assert gpu["weights_bytes"] == places.weight_bytes("big", 2) + places.weight_bytes(other)
        assert 0 < gpu["kv_bytes"] < gpu["usable_bytes"] - gpu["weights_bytes"]
    assert [row["weights_bytes"] for row in places.rows()][:2] == [places.weight_bytes("big", 2)] * 2


APART = """\
fineserve: 1
title: Three models whose TP degree is open
cluster: {gpu: h100-sxm, count: 4}
models:
  - {id: busy, model: llama-3.1-70b, precision: fp8, tp: auto, rate_per_s: 2}
  - {id: calm, model: llama-3.1-70b, precision: fp8, tp: auto, rate_per_s: 1}
  - {id: small, model: llama-3.2-1b, precision: fp8, tp: auto, rate_per_s: 1}
workload: {lengths: {prompt_tokens: 512, output_tokens: 8}, requests: 30}
slo: {ttft_s: 0.04}
systems: [fineserve, dedicated]
seeds: 1
"""


def test_models_with_gpus_of_their_own_take_open_degrees_at_which_all_have_some(tmp_path: Path) -> None:
    """Within 40 ms of a first token both large models want all four GPUs; where none is shared, others would have none."""
    (tmp_path / "apart.yaml").write_text(APART, encoding="utf-8")
    run_experiment(tmp_path / "apart.yaml", tmp_path / "out", jobs=1)
    cells = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    for cell, degrees in zip(cells, ([4, 4, 1], [2, 1, 1]), strict=True):
        assert cell["unplaced"] == []
        assert [len(model["instances"][0]) for model in cell["models"].values()] == degrees


ROOM = """\
fineserve: 1
title: The middle one wants four GPUs, of which the large one leaves three
cluster: {gpu: h100-sxm, count: 4}
models:
  - {id: large, model: llama-3.1-70b, precision: fp8, tp: auto, rate_per_s: 4}
  - {id: middle, model: qwen3-32b, precision: fp16, tp: auto, rate_per_s: 2}
  - {id: small, model: llama-3.1-8b, precision: fp8, tp: auto, rate_per_s: 10}
workload: {lengths: sharegpt_v3_first_turn, requests: 30}
slo: {ttft_s: 0.3}
systems: [fineserve, "prism*", muxserve, s-partition]
seeds: 1
"""


def test_no_open_degree_leaves_a_model_without_a_gpu_that_has_room_at_a_smaller_one(tmp_path: Path) -> None:
    (tmp_path / "room.yaml").write_text(ROOM, encoding="utf-8")
    run_experiment(tmp_path / "room.yaml", tmp_path / "out", jobs=1)
    cells = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["unplaced"] for cell in cells] == [[]] * 4


def test_models_that_take_turns_on_gpus_have_open_degrees_for_which_there_are_workers(tmp_path: Path) -> None:
    """QLM would need workers of four GPUs and of one here; with GPUs for all from the start nobody waits for a swap."""
    text = APART.replace("[fineserve, dedicated]", "[{base: qlm, name: qlm, residency: {policy: qlm, swap_s: 1}}]")
    (tmp_path / "turns.yaml").write_text(text, encoding="utf-8")
    run_experiment(tmp_path / "turns.yaml", tmp_path / "out", jobs=1)
    (cell,) = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    assert cell["finished"] == cell["requests"]


def test_where_no_degree_leaves_gpus_for_all_the_reason_is_their_number(tmp_path: Path) -> None:
    (tmp_path / "apart.yaml").write_text(APART.replace("count: 4", "count: 2"), encoding="utf-8")
    run_experiment(tmp_path / "apart.yaml", tmp_path / "out", jobs=1)
    _, cell = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    (entry,) = cell["unplaced"]
    assert entry["model"] == "small"
    assert {"what": "placement", "misses": cell["misses"]["unplaced"]}.items() <= cell["binds"][-1].items()
    assert entry["why"] == "Dedicated shares no GPU: the 3 models need 3 of their own, there are 2"


def test_an_open_degree_is_that_of_the_gpus_to_which_a_model_is_pinned(tmp_path: Path) -> None:
    pins = "{busy: [[0, 1]], calm: [[2], [3]], small: [[1]]}"
    system = f"[{{base: fineserve, name: mine, placement: {{policy: pinned, groups: {pins}}}}}]"
    (tmp_path / "pins.yaml").write_text(APART.replace("[fineserve, dedicated]", system), encoding="utf-8")
    run_experiment(tmp_path / "pins.yaml", tmp_path / "out", jobs=1)
    (cell,) = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    assert [model["instances"] for model in cell["models"].values()] == [[[0, 1]], [[2], [3]], [[1]]]
    for groups in ("[[0, 1], [2]]", "[[0, 1, 2]]"):
        text = APART.replace("[fineserve, dedicated]", system.replace("[[0, 1]]", groups))
        (tmp_path / "wrong.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"placement.groups.busy: expected [12] different GPUs"):
            load_experiment(tmp_path / "wrong.yaml")


PIPELINES = """\
fineserve: 1
title: Pipelines of two stages, and copies
cluster: {gpu: h100-sxm, count: 4, gpus_per_node: 1}
models:
  - {id: A, model: qwen2.5-14b, precision: fp16, rate_per_s: 2}
workload: {lengths: {prompt_tokens: 512, output_tokens: 64}, requests: 40}
slo: {ttft_s: 2.0}
systems: [vllm-dp, vllm-pp]
seeds: 1
"""


def test_a_stage_of_a_pipeline_holds_its_layers_alone(tmp_path: Path) -> None:
    """Half of the weights on each GPU of a pair; the other half is KV memory, and what is left of it is no more."""
    (tmp_path / "pairs.yaml").write_text(PIPELINES, encoding="utf-8")
    run_experiment(tmp_path / "pairs.yaml", tmp_path / "out", jobs=1)
    copies, pairs = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["cells"]
    for copy, stage in zip(copies["gpus"], pairs["gpus"], strict=True):
        assert stage["weights_bytes"] == pytest.approx(copy["weights_bytes"] / 2, rel=0.01)
        assert stage["weights_bytes"] + stage["kv_bytes"] == pytest.approx(copy["weights_bytes"] + copy["kv_bytes"])
        assert stage["kv_least_bytes"] <= stage["kv_left_bytes"] <= stage["kv_bytes"] * 1.01


SLICES = """\
fineserve: 1
title: Two models on two slices of a GPU
cluster: {gpu: h100-sxm, count: 1, sharing: {mig: 3g}}
models:
  - {id: a, model: llama-3.2-1b, precision: fp16, rate_per_s: 4}
  - {id: b, model: llama-3.2-1b, precision: fp16, rate_per_s: 4}
workload: {lengths: {prompt_tokens: 512, output_tokens: 8}, requests: 60}
slo: {ttft_s: 0.5}
systems: [fineserve]
seeds: 1
"""


def test_slices_are_counted_and_paid_for_as_the_gpus_that_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "slices.yaml").write_text(SLICES, encoding="utf-8")
    run_experiment(tmp_path / "slices.yaml", tmp_path / "out", jobs=1)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    (found,) = summary["cells"]
    assert found["cluster"] == {"gpu": "h100-sxm", "count": 1, "slices": "2 of 3g"} and len(found["gpus"]) == 2
    price, tokens_per_s = summary["price"]["usd_per_gpu_hour"], found["metrics"]["token_throughput_per_s"]["mean"]
    assert found["cost"]["usd_per_hour"] == price and summary["answer"]["choice"]["gpus"] == 1
    assert found["cost"]["usd_per_mtoken"] == pytest.approx(price / 3600 / tokens_per_s * 1e6)
    assert answer_lines(summary)[0].startswith("Take FineServe on 1 h100-sxm in slices (2 of 3g), which keeps")
