"""Length sources: constants, lognormals, real pairs, and the embedded sketches against the errors that they state."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import (
    DATASETS,
    ConstantLengths,
    LengthPairs,
    Lognormal,
    LognormalLengths,
    TraceError,
    generate,
    length_source,
    poisson,
    read_lengths,
    sharegpt_sketch,
)
from fineserve_traces.sketch import LengthSketch, load_sketch, sketch_document
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 200_000


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_sharegpt_sketch", ROOT / "traces" / "build_sharegpt_sketch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constant_and_generate(rng):
    trace = generate(poisson(rng, 1.0, 10), ConstantLengths(100, 20), rng, model="m")
    assert set(trace.prompt_tokens.tolist()) == {100}
    assert set(trace.output_tokens.tolist()) == {20}
    assert (trace.models, trace.source) == (("m",), "constant 100/20 tokens")
    with pytest.raises(ValueError, match="at least 1 token"):
        ConstantLengths(0, 1)


def test_lognormal_meets_its_mean_and_median(rng):
    lengths = LognormalLengths(Lognormal(615, 485, 100_000), Lognormal(245, 198, 300))
    prompt, output = lengths.sample(rng, SAMPLES)
    assert prompt.mean() == pytest.approx(615, rel=0.01)
    assert np.median(prompt) == pytest.approx(485, rel=0.01)
    assert np.median(output) == pytest.approx(198, rel=0.01)
    assert output.max() == 300
    assert lengths.source == "lognormal (mean/median/max tokens) prompt 615/485/100000, output 245/198/300"
    for wrong in (Lognormal(100, 200, 300), Lognormal(10, 0, 300), Lognormal(100, 90, 50)):
        with pytest.raises(ValueError, match="no lognormal length"):
            LognormalLengths(wrong, wrong)


def test_real_pairs_are_drawn_as_pairs(rng):
    pairs = LengthPairs(np.array([1, 2, 3]), np.array([10, 20, 30]), "mine")
    prompt, output = pairs.sample(rng, 3000)
    assert np.array_equal(output, prompt * 10)
    assert np.bincount(prompt)[1:] == pytest.approx(1000, rel=0.1)
    assert pairs.with_prompts_up_to(2).prompt_tokens.tolist() == [1, 2]
    with pytest.raises(TraceError, match="row 2, column output_tokens: 0 is too few"):
        LengthPairs(np.array([1, 2]), np.array([1, 0]), "mine")
    with pytest.raises(TraceError, match="2 prompts and 1 outputs"):
        LengthPairs(np.array([1, 2]), np.array([1]), "mine")
    with pytest.raises(TraceError, match="0 prompts"):
        pairs.with_prompts_up_to(0)


def test_sketch_inverse_cdf_by_hand():
    sketch = LengthSketch(
        prompt_levels=np.array([0, 0.5, 1]),
        prompt_quantiles=np.array([0.0, 100, 1000]),
        output_levels=np.array([0.0, 0.2, 1]),
        output_quantiles=np.array([[10.0, 20, 100], [500, 500, 500]]),
        source="by hand",
    )
    prompt, output = sketch.at(np.array([0.0, 0.25, 0.49, 0.75]), np.array([0.0, 0.1, 0.6, 0.9]))
    assert prompt.tolist() == [1, 50, 98, 550]  # never less than one token
    assert output.tolist() == [10, 15, 60, 500]


@pytest.mark.parametrize("name", DATASETS)
def test_a_sample_of_the_sketch_meets_the_stated_errors(rng, name):
    document = sketch_document(name)
    original, errors = document["original"], document["errors"]
    sample = load_sketch(name).sample(rng, SAMPLES)
    spearman = stats.spearmanr(*sample).statistic
    assert abs(spearman - original["spearman"]) <= abs(errors["spearman"]) + 4 / SAMPLES**0.5
    for side, tokens in zip(("prompt", "output"), sample, strict=True):
        mean, mean_noise = tokens.mean(), 4 * tokens.std() / SAMPLES**0.5
        assert abs(mean - original[f"{side}_mean"]) <= abs(errors[f"{side}_mean"]) * mean + mean_noise
        for level in (0.5, 0.95, 0.99):
            figure = f"{side}_p{level * 100:.0f}"
            level_noise = 4 * (level * (1 - level) / SAMPLES) ** 0.5
            low, high = np.quantile(tokens, [level - level_noise, level + level_noise])
            slack = (abs(errors[figure]) + 1e-4) * original[figure]
            assert low - slack <= original[figure] <= high + slack, figure


def test_the_default_sketch_is_good_and_says_what_it_is():
    errors = sketch_document("sharegpt_v3_first_turn")["errors"]
    assert max(abs(error) for error in errors.values()) < 0.01
    assert sharegpt_sketch().source.startswith("sharegpt_v3_first_turn: embedded sketch of 58,000 real pairs, KS ")


@pytest.mark.parametrize("name", DATASETS)
def test_sketch_quantiles_are_monotone(name):
    sketch = load_sketch(name)
    assert np.all(np.diff(sketch.prompt_levels) > 0)
    assert np.all(np.diff(sketch.output_levels) > 0)
    assert np.all(np.diff(sketch.prompt_quantiles) >= 0)
    assert np.all(np.diff(sketch.output_quantiles, axis=1) >= 0)


def test_length_source_says_which_data_it_uses(tmp_path):
    assert "embedded sketch" in length_source("sharegpt_v3_first_turn").source
    (tmp_path / "sharegpt_v3_first_turn.csv.gz").write_text("prompt_tokens,output_tokens\n7,8\n")
    real = length_source("sharegpt_v3_first_turn", tmp_path)
    assert real.source == "real pairs of sharegpt_v3_first_turn.csv.gz (1 rows)"
    with pytest.raises(TraceError, match=r"arxiv_sample: neither .*lengths/arxiv_sample_vattention.csv.gz nor "):
        length_source("arxiv_sample", tmp_path)
    with pytest.raises(ValueError, match="unknown lengths 'sharegpt'; known are sharegpt_v3_first_turn"):
        length_source("sharegpt")


def test_a_data_set_is_cut_as_it_says(tmp_path):
    (tmp_path / "lengths").mkdir()
    path = tmp_path / "lengths" / "sharegpt_8k_multiturn_sarathi.csv.gz"
    path.write_text("prompt_tokens,output_tokens\n4096,8\n4097,9\n")
    real = length_source("sharegpt_multiturn_4k", tmp_path)
    assert real.prompt_tokens.tolist() == [4096]
    assert "prompts up to 4096 tokens" in real.source


@pytest.mark.parametrize("name", DATASETS)
def test_rebuilding_reproduces_the_sketch(shared_data, tmp_path, builder, capsys, name):
    builder.main([str(shared_data), "--name", name, "--out", str(tmp_path)])
    embedded = ROOT / "traces" / "fineserve_traces" / "data" / f"{name}.json"
    assert (tmp_path / f"{name}.json").read_bytes() == embedded.read_bytes()
    assert f"{name}: " in capsys.readouterr().out


@pytest.mark.parametrize("name", DATASETS)
def test_stated_ks_distances_hold_against_the_real_pairs(shared_data, rng, name):
    real = length_source(name, shared_data)
    errors = sketch_document(name)["errors"]
    prompt, output = load_sketch(name).sample(rng, SAMPLES)
    noise = 1.63 / SAMPLES**0.5  # KS quantile at 1 %
    assert stats.ks_2samp(real.prompt_tokens, prompt).statistic <= errors["prompt_ks"] + noise
    assert stats.ks_2samp(real.output_tokens, output).statistic <= errors["output_ks"] + noise


def test_the_real_lengths_are_read(shared_data):
    pairs = read_lengths(shared_data / "lengths" / "sharegpt_val10k_llama2.csv.gz")
    assert len(pairs) == 10_000
    assert (round(pairs.prompt_tokens.mean()), round(pairs.output_tokens.mean())) == (246, 326)
