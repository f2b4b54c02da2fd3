"""Requests: named streams, common random numbers, expected rates."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import generate, merge, poisson

from fineserve_sim.experiment import ConfigError, experiment_for_trace, load_experiment, run_experiment
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.file.sources import length_source
from fineserve_sim.experiment.run.rates import base_rates, expected_rates, mean_lengths
from fineserve_sim.experiment.run.streams import stream, stream_names
from fineserve_sim.experiment.run.workload import alone_trace, build_requests, build_trace, isolated_trace

LENGTHS = ("lengths: {prompt_tokens: 512, output_tokens: 20}", "lengths: sharegpt_v3_first_turn")


def setup_of(path: Path) -> Setup:
    return load_experiment(path).setup


def test_streams_depend_on_seed_and_name_alone() -> None:
    draws = {(seed, name): stream(seed, name).random() for seed in (0, 1) for name in ("arrivals/A", "arrivals/B")}
    assert len(set(draws.values())) == 4
    assert stream(0, "arrivals/A").random() == draws[0, "arrivals/A"]


ALIKE = ("gnyijstj", "etislvlf")
"""Names of the same hash."""


def test_models_whose_names_share_a_hash_share_no_stream(write_file) -> None:
    """The one that comes first has the streams of its name, whether the other is there or not."""
    one, other = stream_names(ALIKE).values()
    assert one == ALIKE[0] and other == ALIKE[1] + "'" and stream_names(ALIKE[1:]) == {ALIKE[1]: ALIKE[1]}
    assert stream_names("ABC") == {name: name for name in "ABC"}
    assert len(set(stream_names([*ALIKE, other]).values())) == 3, "a model may be called as another one's streams"
    path = write_file(LENGTHS, ("share: 3", "share: 2"))
    path.write_text(path.read_text().replace("id: A", f"id: {ALIKE[0]}").replace("id: B", f"id: {ALIKE[1]}"))
    trace = build_trace(setup_of(path), "A", 1.0, 0)
    first_s = [trace.arrival_s[trace.model == model][0] for model in (0, 1)]
    assert first_s[0] != first_s[1]


@pytest.mark.parametrize("lengths", ["sharegpt_v3_first_turn", "burstgpt", "{prompt_tokens: 512, output_tokens: 20}"])
@pytest.mark.parametrize("share", ["0.0001", "2"])
def test_the_first_requests_are_those_of_whole_processes(write_file, lengths: str, share: str) -> None:
    """Of two full processes merged; also where one of them has no request among the first."""
    path = write_file(("share: 2}", f"share: {share}}}"), ("{prompt_tokens: 512, output_tokens: 20}", lengths))
    setup, source = load_experiment(path).setup, length_source(load_experiment(path).setup)
    parts = [
        generate(poisson(stream(1, f"arrivals/{name}"), rate_per_s, 70), source, stream(1, f"lengths/{name}"), name)
        for name, rate_per_s in base_rates(setup, "A").items()
    ]
    expected, found = merge(parts).head(70), build_trace(setup, "A", 1.0, 1)
    assert found.models == expected.models == ("A", "B")
    for column in ("arrival_s", "model", "prompt_tokens", "output_tokens"):
        one, other = getattr(found, column), getattr(expected, column)
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), column
    assert (share == "2") == (0 in found.model)


def test_a_rate_scale_changes_times_only(write_file) -> None:
    setup = setup_of(write_file(LENGTHS))
    slow, fast = build_trace(setup, "A", 1, 0), build_trace(setup, "A", 4, 0)
    np.testing.assert_array_equal(slow.prompt_tokens, fast.prompt_tokens)
    np.testing.assert_array_equal(slow.model, fast.model)
    np.testing.assert_allclose(slow.arrival_s, 4 * fast.arrival_s)
    other = build_trace(setup, "A", 1, 1)
    assert not np.array_equal(slow.prompt_tokens, other.prompt_tokens)


def test_another_model_changes_no_other_stream(write_file) -> None:
    two = build_trace(
        setup_of(write_file(LENGTHS, ("share:", "rate_per_s:"), ("loads:\n  A: {rate_per_s: 20}\n", ""))), None, 1, 0
    )
    third = "\n  - {id: C, model: llama-3.1-8b, precision: fp8, rate_per_s: 9}\nworkload:"
    path = write_file(
        LENGTHS, ("share:", "rate_per_s:"), ("loads:\n  A: {rate_per_s: 20}\n", ""), ("\nworkload:", third)
    )
    three = build_trace(setup_of(path), None, 1, 0)
    for index in (0, 1):
        old, new = two.model == index, three.model == index
        count = int(new.sum())
        np.testing.assert_array_equal(two.arrival_s[old][:count], three.arrival_s[new])
        np.testing.assert_array_equal(two.prompt_tokens[old][:count], three.prompt_tokens[new])


def test_rates_follow_the_shares(write_file) -> None:
    setup = setup_of(write_file(("requests: 60", "requests: 20000")))
    assert base_rates(setup, "A") == pytest.approx({"A": 8, "B": 12})
    assert expected_rates(setup, "A", 2) == pytest.approx({"A": 16, "B": 24})
    trace = build_trace(setup, "A", 2, 0)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(40, rel=0.03)
    assert np.mean(trace.model == 0) == pytest.approx(0.4, abs=0.015)


@pytest.mark.parametrize("process", ["gamma", "weibull"])
def test_burstiness_reaches_the_arrivals(write_file, process: str) -> None:
    setup = setup_of(
        write_file(("{process: poisson}", f"{{process: {process}, cv: 3}}"), ("requests: 60", "requests: 20000"))
    )
    trace = build_trace(setup, "A", 1, 0)
    gaps_s = np.diff(trace.arrival_s[trace.model == 1])
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(3, rel=0.1)


def test_phases_follow_their_rates(write_file) -> None:
    changes = (
        ("share: 2", "phases: [{duration_s: 60, rate_per_s: 4}, {duration_s: 60, rate_per_s: 0}]"),
        ("share: 3", "rate_per_s: 5"),
        ("loads:\n  A: {rate_per_s: 20}\n", ""),
        ("  requests: 60\n  warmup_requests: 10\n", ""),
        ("workload.requests: 30, ", ""),
    )
    setup = setup_of(write_file(*changes))
    assert base_rates(setup, None) == pytest.approx({"A": 2, "B": 5})
    trace = build_trace(setup, None, 10, 0)
    own = trace.arrival_s[trace.model == 0]
    assert len(own) == pytest.approx(2400, rel=0.1)
    assert own.max() < 60
    assert 110 < trace.arrival_s[trace.model == 1].max() < 120


def test_conversations_repeat_what_was_said(write_file) -> None:
    """Of 70 drawn requests each opens two turns; the second begins with 512 + 20 tokens of the first. Expected lengths are the
    mean over turns, with the prefix that all share."""
    change = (
        "  warmup_requests: 10\n",
        "  warmup_requests: 10\n  conversations: {turns: 2, gap_s: 2, shared_tokens: 256}\n",
    )
    setup = setup_of(write_file(change))
    trace = build_trace(setup, "A", 2, 0)
    assert len(trace) == 140 and sorted(set(trace.prompt_tokens.tolist())) == [768, 1300]
    assert trace.prefix_hashes is not None and all(hashes[0] == 0 for hashes in trace.prefix_hashes)
    first, second = (trace.arrival_s[trace.prompt_tokens == prompt] for prompt in (768, 1300))
    np.testing.assert_allclose(second - first, 1.0)  # the gap shrinks with the rate scale
    assert mean_lengths(setup, "A") == (768 + 266, 20)


def test_isolated_requests_never_meet(write_file) -> None:
    trace = isolated_trace(setup_of(write_file(LENGTHS)), "B")
    assert np.diff(trace.arrival_s).min() >= 100
    assert set(trace.output_tokens) == {1}
    assert len(set(trace.prompt_tokens.tolist())) > 50


def test_expected_lengths_are_those_of_the_source(write_file) -> None:
    assert mean_lengths(setup_of(write_file()), "A") == (512, 20)
    prompt, output = mean_lengths(setup_of(write_file(LENGTHS)), "A")
    assert prompt == pytest.approx(
        248, rel=0.02
    )  # shared data: mean of the 58,000 pairs, to which the sketch is fitted
    assert output == pytest.approx(325, rel=0.02)


MODELS = [{"id": name, "model": "llama-3.1-8b", "precision": "fp8"} for name in "AB"]
ROWS = "arrival_s,model,prompt_tokens,output_tokens\n10,B,100,5\n12,A,300,5\n20,B,200,5\n"


def test_a_trace_is_replayed_at_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ROWS, encoding="utf-8")
    setup = experiment_for_trace(path, ["fineserve"], MODELS, ttft_slo_s=1).setup
    trace = build_trace(setup, None, 2, 0)
    np.testing.assert_allclose(trace.arrival_s, [0, 1, 5])
    assert [trace.models[index] for index in trace.model] == ["B", "A", "B"]
    assert expected_rates(setup, None, 2) == pytest.approx({"A": 0.2, "B": 0.4})
    assert mean_lengths(setup, "B") == (150, 5)


def test_a_trace_is_dealt_out_by_share(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "\n".join(f"{second},{10 + second},5" for second in range(4000))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows, encoding="utf-8")
    models = [model | {"share": share} for model, share in zip(MODELS, (1, 3), strict=True)]
    setup = experiment_for_trace(path, ["fineserve"], models).setup
    trace = build_trace(setup, None, 1, 0)
    assert np.mean(trace.model == 1) == pytest.approx(0.75, abs=0.03)


BAD_TRACES = {
    "empty": ("arrival_s,prompt_tokens,output_tokens\n", "no rows"),
    "wrong column": ("arrival_s,prompt,output_tokens\n1,2,3\n", "prompt_tokens"),
    "zero tokens": ("arrival_s,prompt_tokens,output_tokens\n1,0,3\n", "too few tokens"),
    "negative time": ("arrival_s,prompt_tokens,output_tokens\n-1,1,3\n", "is negative"),
    "NaN time": ("arrival_s,prompt_tokens,output_tokens\nnan,1,3\n", "not a time"),
    "out of order": ("arrival_s,prompt_tokens,output_tokens\n2,1,3\n1,1,3\n", "earlier than the row before"),
    "huge prompt": ("arrival_s,prompt_tokens,output_tokens\n1,10000000,3\n", "request 1: 10000000 prompt_tokens"),
    "unknown model": ("arrival_s,model,prompt_tokens,output_tokens\n1,Z,1,3\n", 'a model "Z" that is no id'),
}


@pytest.mark.parametrize(("text", "expected"), BAD_TRACES.values(), ids=BAD_TRACES)
def test_a_bad_trace_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"workload\.trace") as raised:
        experiment_for_trace(path, ["fineserve"], MODELS)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_truncated_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(ROWS.encode())[:-12])
    with pytest.raises(ConfigError, match="cut short"):
        experiment_for_trace(path, ["fineserve"], MODELS)


CONVERSATIONS = ("  requests: 60", "  conversations: {turns: 3, gap_s: 5, shared_tokens: 4096}\n  requests: 60")


def test_a_model_alone_keeps_what_its_prompts_share(write_file) -> None:
    setup = setup_of(write_file(CONVERSATIONS))
    together, alone = build_trace(setup, "A", 1, 0), alone_trace(setup, "B", "A", 0)
    own = np.flatnonzero(together.model == together.models.index("B"))
    assert together.prefix_hashes and alone.prefix_hashes == tuple(together.prefix_hashes[row] for row in own)
    assert alone.prefix_block_tokens == together.prefix_block_tokens


@pytest.fixture
def base_slo_alone_s(write_file, tmp_path: Path) -> Callable[[bool], float]:
    """Median TTFT of a model alone, 4,096 of whose 4,608 prompt tokens are shared, with a cache or without."""

    def base_s(prefix_cache: bool) -> float:
        memory = f"{{policy: private, prefix_cache: {str(prefix_cache).lower()}}}"
        path = write_file(
            ("  requests: 60", "  conversations: {shared_tokens: 4096}\n  requests: 60"),
            ("  - {id: B, model: llama-3.1-8b, precision: fp8, share: 3}\n", ""),
            ("A: {rate_per_s: 20}", "A: {rate_per_s: 2}"),
            ('systems: [fineserve, "prism*"]', f"systems: [{{base: vllm-v0.4.2, name: x, memory: {memory}}}]"),
            ("{system: dedicated, load: isolated, quantile: 0.95}", "{system: x, load: alone, quantile: 0.5}"),
        )
        summary = json.loads(run_experiment(path, tmp_path / str(prefix_cache), quick=True, jobs=1).read_text())
        return float(summary["slo"]["A"]["base_s"])

    return base_s


def test_a_reference_alone_caches_prefixes(base_slo_alone_s: Callable[[bool], float]) -> None:
    assert base_slo_alone_s(True) < base_slo_alone_s(False) / 3


@pytest.mark.parametrize("build", [build_trace, build_requests])
def test_a_trace_that_changes_under_a_run_ends_it(tmp_path: Path, build: Callable[..., object]) -> None:
    """Its requests would be stored under the key of the others, for good."""
    header, trace = "arrival_s,model,prompt_tokens,output_tokens\n", tmp_path / "trace.csv"
    trace.write_text(header + "0,A,64,4\n1,A,64,4\n")
    models = [{"id": "A", "model": "llama-3.1-8b", "precision": "fp8"}]
    setup = experiment_for_trace(trace, ["fineserve"], models, ttft_slo_s=0.5).setup
    trace.write_text(header + "0,A,64,4\n1,A,64,4\n2,A,64,4\n")
    with pytest.raises(ConfigError, match=r"trace\.csv: has changed since the experiment was read"):
        build(setup, None, 1.0, 0)
