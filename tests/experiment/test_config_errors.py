"""Bad files and options: one line that says where, what, and what would be right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.experiment import ConfigError, experiment_from, load_experiment
from fineserve_sim.experiment.file.document import parse_yaml
from fineserve_sim.experiment.file.schema import Engine, ExperimentFile

LENGTHS = "lengths: {prompt_tokens: 512, output_tokens: 20}"
SYSTEMS = 'systems: [fineserve, "prism*"]'
REFERENCE = "{system: dedicated, load: isolated, quantile: 0.95}"

CASES = {
    "misspelt key": ("  requests: 60", "  request: 60", ':10: workload.request: unknown key; did you mean "requests"?'),
    "misspelt tag": (
        "{process: poisson}",
        "{proces: poisson}",
        'arrivals.proces: unknown key; did you mean "process"?',
    ),
    "missing key": ("title: Small\n", "", "title: missing"),
    "key twice": ("title: Small", "title: Small\ntitle: Other", ":3: title: given twice; first at"),
    "wrong unit": ("rate_per_s: 20", "rate_per_ms: 20", 'loads.A.rate_per_ms: unknown key; did you mean "rate_per_s"?'),
    "zero GPUs": ("count: 2", "count: 0", "cluster.count: must be greater than or equal to 1, not 0"),
    "text for number": ("count: 2", "count: two", "cluster.count: must be a whole number, not 'two'"),
    "NaN rate": ("rate_per_s: 20", "rate_per_s: .nan", "must be a finite number, not nan"),
    "negative rate": ("rate_per_s: 20", "rate_per_s: -1", "must be greater than 0, not -1"),
    "infinite share": ("share: 2", "share: .inf", "models.0.share: must be a finite number, not inf"),
    "zero tokens": ("prompt_tokens: 512", "prompt_tokens: 0", "must be greater than or equal to 1, not 0"),
    "huge prompt": (
        "prompt_tokens: 512",
        "prompt_tokens: 10000000",
        "must be less than or equal to 1048576, not 10000000",
    ),
    "beyond context": ("prompt_tokens: 512", "prompt_tokens: 200000", "takes at most 131072"),
    "schema version": ("fineserve: 1", "fineserve: 2", "fineserve: unknown value 2; expected one of: 1"),
    "unknown system": ("fineserve, ", "fineserv, ", 'systems.0: unknown system "fineserv"; did you mean "fineserve"?'),
    "unknown model": (
        "model: llama-3.1-8b, precision: fp8",
        "model: lama-3.1-8b, precision: fp8",
        ":6: models.1.model:",
    ),
    "unknown precision": ("precision: fp8", "precision: fp9", "unknown precision 'fp9'; nearest: fp8"),
    "unknown GPU": ("gpu: h100-sxm", "gpu: h100-smx", "cluster.gpu: unknown GPU 'h100-smx'; nearest: h100-sxm"),
    "host memory below nothing": (
        "count: 2}",
        "count: 2}\nengine: {kv_offloading: {size_gib: 8}}",
        ":4: engine.kv_offloading: no system keeps prefixes on its GPUs; give one memory: {policy: private, prefix",
    ),
    "host memory of SGLang": (
        "count: 2}",
        "count: 2}\nengine: {batching: sglang, kv_offloading: {size_gib: 8}}",
        ":4: engine.kv_offloading: is vLLM's; leave it out with batching sglang",
    ),
    "negative host memory": (
        "count: 2}",
        "count: 2}\nengine: {kv_offloading: {size_gib: -1}}",
        "engine.kv_offloading.size_gib: must be greater than or equal to 0, not -1",
    ),
    "unknown sharing": (
        "count: 2",
        "count: 2, sharing: msp",
        ":3: cluster.sharing: must be exclusive, fluid, time_slice, in_turn, mps, {mps: {MODEL: percent}}",
    ),
    "sharing of too many GPUs": (
        "count: 2",
        "count: 2, sharing: [mps]",
        "cluster.sharing: has 1 entries for 2 GPUs; give one for all, or one each",
    ),
    "sharing beyond a GPU": (
        "count: 2",
        "count: 2, sharing: {mps: {A: 120}}",
        "cluster.sharing: must be less than or equal to 100, not 120",
    ),
    "unknown MIG profile": (
        "count: 2",
        "count: 2, sharing: {mig: 5g}",
        "cluster.sharing: h100-sxm has no MIG profile 5g; known: 1g, 1g+, 2g, 3g, 4g, 7g",
    ),
    "no MIG": (
        "gpu: h100-sxm, count: 2",
        "gpu: l40s, count: 2, sharing: {mig: 3g}",
        "cluster.sharing: unknown GPU with MIG",
    ),
    "a model too big for a slice": (
        "count: 2",
        "count: 2, sharing: {mig: 1g}",
        "model A fits on no GPU: 15.0 GiB of weights",
    ),
    "tp over slices": (
        "models:\n  - {id: A, model: llama-3.1-8b, precision: W16A16,",
        "models:\n  - {id: A, model: llama-3.1-8b, precision: W16A16, tp: 2,",
        "models.0.tp: must be 1 in a cluster with MIG, whose slices form no group; not 2",
        ("count: 2", "count: 2, sharing: {mig: 3g}"),
    ),
    "MIG of a system": (
        SYSTEMS,
        "systems: [{base: fineserve, name: x, sharing: {mig: 3g}}]",
        "systems.0.sharing: a system does not divide GPUs by MIG: say it in cluster.sharing",
    ),
    "inline GPU": (
        "gpu: h100-sxm",
        "gpu: {memory_gb: 80}",
        'cluster.gpu.memory_gb: unknown key; did you mean "memory_gib"?',
    ),
    "unknown lengths": (LENGTHS, "lengths: sharegpt_v3_first_turns", 'did you mean "sharegpt_v3_first_turn"?'),
    "no config.json": (
        "model: llama-3.1-8b, precision: fp8",
        "model: {config: no.json}, precision: fp8",
        "models.1.model:",
    ),
    "too big": (
        "model: llama-3.1-8b, precision: W16A16",
        "model: llama-3.1-70b, precision: W16A16",
        "fits on no GPU: 131",
    ),
    "tp beyond node": (
        "precision: fp8,",
        "precision: fp8, tp: 4,",
        "models.1.tp: must be at most the 2 GPUs of a node",
    ),
    "two loads": ("share: 2", "share: 2, rate_per_s: 3", "needs exactly one of share, rate_per_s, phases"),
    "no loads": ("loads:\n  A: {rate_per_s: 20}\n", "", "missing loads"),
    "same id": ("id: B", "id: A", 'models.1: "A" is here a second time'),
    "two SLOs": ("slo:\n", "slo:\n  ttft_s: 1\n", "slo: ttft_s and ttft are both given"),
    "SLO by SLO system": ("{system: dedicated", "{system: fineserve", "fineserve itself decides by SLOs"),
    "quantile": ("quantile: 0.95", "quantile: 95", "must be less than 1, not 95"),
    "unknown axis": ("{slo_scale: [2, 4]}", "{slo_scal: [2, 4]}", 'unknown axis; did you mean "slo_scale"?'),
    "axis value": ("slo_scale: [2, 4]", "slo_scale: [2, 0]", "must be a number greater than 0, not 0"),
    "axis value twice": ("slo_scale: [2, 4]", "slo_scale: [2, 2]", "a value is given twice"),
    "load axis": ("{slo_scale: [2, 4]}", "{load: [A, C]}", "unknown load 'C'; expected one of: A"),
    "bad dotted axis": ("{slo_scale: [2, 4]}", "{engine.token_budgt: [2]}", 'did you mean "token_budget"?'),
    "bad dotted value": ("{slo_scale: [2, 4]}", "{engine.token_budget: [0]}", "engine.token_budget: must be greater"),
    "quick key": (
        "workload.requests: 30",
        "workload.request: 30",
        'workload.request: unknown key; did you mean "requests"?',
    ),
    "variant option": (SYSTEMS, "systems: [{base: prism*, name: x, scheduler: {latte: drop}}]", 'did you mean "late"?'),
    "variant policy": (SYSTEMS, "systems: [{base: prism*, name: x, scheduler: {policy: fcf}}]", 'did you mean "fcfs"?'),
    "variant value": (
        SYSTEMS,
        "systems: [{base: prism*, name: x, scheduler: {late: never}}]",
        "scheduler.late: unknown value",
    ),
    "pinned model": (
        SYSTEMS,
        "systems: [{base: prism*, name: x, placement: {policy: pinned, groups: {A: [[0]]}}}]",
        "no GPU is given for model B",
    ),
    "pinned GPU": (
        SYSTEMS,
        "systems: [{base: prism*, name: x, placement: {policy: pinned, groups: {A: [[0]], B: [[2]]}}}]",
        "groups.B: expected 1 different GPUs of 0 to 1 a replica, not [2]",
    ),
    "too many GPUs": (
        "count: 2",
        "count: 1000000000",
        ":3: cluster.count: must be less than or equal to 100000, not 1000000000",
    ),
    "too many requests": (
        "requests: 60",
        "requests: 1000000000000",
        ":10: workload.requests: must be less than or equal to 100000000, not 1000000000000",
    ),
    "too long": (
        "rate_per_s: 20",
        "rate_per_s: 1.0e-300",
        "loads.A.rate_per_s: arrivals of 3.5e+301 s at rate scale 2; a run simulates at most a year, 31,622,400 s",
    ),
    "too slow a clock": (
        "{rate_scale: [1, 2]}",
        "{rate_scale: [1.0e-300]}",
        "loads.A.rate_per_s: arrivals of 3.5e+300 s",
    ),
    "phases that bring too many": (
        "share: 2}",
        "phases: [{duration_s: 60, rate_per_s: 1.0e+12}]}",
        "models.0.phases: about 1.2e+14 requests at rate scale 2; a run simulates at most 100,000,000",
        ("  requests: 60\n  warmup_requests: 10\n", ""),
    ),
    "conversations that last too long": (
        "  requests: 60",
        "  requests: 60\n  conversations: {turns: 2, gap_s: 1.0e+15}",
        "workload.conversations: arrivals of 5e+14 s",
    ),
    "no requests": ("  requests: 60\n", "", "workload.requests: missing"),
    "replay alone": ("{process: poisson}", "{process: replay}", "workload.arrivals: replay needs workload.trace"),
    "claim metric": (
        "seeds: 3",
        "seeds: 3\nclaims: [{id: x, paper: 1, measure: value, metric: ttft, of: fineserve, at: {sweep: slo}}]",
        "claims.0.metric: unknown metric 'ttft'",
    ),
    "claim of many cells": (
        "seeds: 3",
        "seeds: 3\nclaims: [{id: x, paper: 1, measure: value, metric: ttft_p95_s, of: fineserve, at: {sweep: slo}}]",
        "2 cells of fineserve are there; name more axes",
    ),
    "figure axis": (
        "seeds: 3",
        "seeds: 3\nfigures: [{name: f, sweep: slo, x: rate_scale, panels: [ttft_p95_s]}]",
        'sweep slo has no axis "rate_scale"',
    ),
}


@pytest.mark.parametrize(("old", "new", "expected", "beside"), [(*case, ())[:4] for case in CASES.values()], ids=CASES)
def test_each_mistake_is_one_line_at_its_place(
    write_file, old: str, new: str, expected: str, beside: tuple[str, ...]
) -> None:
    path = write_file((old, new), *([beside] if beside else []))
    with pytest.raises(ConfigError) as raised:
        load_experiment(path)
    text = str(raised.value)
    assert expected in text
    assert text.startswith(str(path))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ({"trace": "far.csv", "assign": "share"}, "workload.trace: arrivals of 1e+08 s"),
        (
            {"lengths": "burstgpt", "arrivals": {"process": "arena", "duration_s": 1e15}},
            "workload.arrivals: arrivals of",
        ),
    ],
    ids=["one arrival of a trace", "processes of many models"],
)
def test_what_lasts_too_long_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: dict[str, object], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("far.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1e8,100,10\n", encoding="utf-8")
    shares = {"share": 1} if "trace" in workload else {}
    models = [{"id": name, "model": "llama-3.1-8b", "precision": "fp8", **shares} for name in "ABCDE"]
    file = {"fineserve": 1, "title": "Far", "cluster": {"gpu": "h100-sxm", "count": 5}, "models": models}
    with pytest.raises(ConfigError, match=f"{re.escape(expected)}.*; a run simulates at most a year"):
        experiment_from(file | {"workload": workload, "slo": {"ttft_s": 1.0}, "systems": ["static*"]})


OPTIONS = {
    "unknown": ("engine.token_budgt", "1", 'engine.token_budgt: unknown key; did you mean "token_budget"?'),
    "value": ("seeds", "0", "seeds: must be greater than or equal to 1, not 0"),
    "through a value": ("title.x", "1", 'title.x: "x" cannot be set'),
    "no item": ("models.7.tp", "1", 'models.7.tp: "7" is no item of the list; expected 0 to 1'),
    "not YAML": ("title", "[", "'[' is not a YAML value"),
    "quick": ("quick.seeds", "1", "set the key itself"),
}


@pytest.mark.parametrize(("key", "value", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_options_get_the_same_errors(write_file, key: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_experiment(write_file(), overrides=[(key, value)])
    assert str(raised.value).startswith(f"--set {key}={value}: ")
    assert expected in str(raised.value)


def test_options_win_over_quick(write_file) -> None:
    experiment = load_experiment(write_file(), [("workload.requests", "40"), ("models.1.tp", "2")], quick=True, seeds=2)
    assert experiment.file.workload.requests == 40
    assert experiment.file.models[1].tp == 2
    assert experiment.file.seeds == 2
    assert load_experiment(write_file(), quick=True).file.seeds == 1


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "a: &x 1\nb: *x", "\t", "a: !!int x", "a: !!python/none x", "? [1]\n: 2"]
)
def test_what_is_no_yaml_mapping_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_experiment(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_file_a_folder_and_binary_data(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(ConfigError, match=path.name):
            load_experiment(path)


@given(st.text(max_size=200))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_yaml(text, "x.yaml")
    except ConfigError as problem:
        assert "\n" not in str(problem)


def test_places_and_numbers_of_yaml() -> None:
    document = parse_yaml("a: 1e3\nb:\n  - {c: 2}\n", "f.yaml")
    assert document.data == {"a": 1000.0, "b": [{"c": 2}]}
    assert document.place(("b", 0, "c")) == "f.yaml:3"
    assert document.place(("b", 0, "missing")) == "f.yaml:3"


def test_engine_options_are_those_of_the_cluster() -> None:
    """The schema repeats the engine's settings to check them; names and defaults must stay the same.

    ``static_part`` follows from the batching and the number of models, so that a file cannot set it.
    """
    from dataclasses import asdict

    from fineserve_sim.cluster import EngineSettings

    settings = asdict(EngineSettings())
    assert settings.pop("static_part") is False
    assert Engine().model_dump() == settings


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_experiments_are_valid_and_say_what_they_assume(path: Path) -> None:
    for quick in (False, True):
        experiment = load_experiment(path, quick=quick)
        assert experiment.points
        assert isinstance(experiment.file, ExperimentFile)
    assert experiment.file.assumptions
