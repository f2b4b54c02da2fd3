"""A plan for the models of an experiment: what it takes over, and mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import fineserve_sim as fs
from fineserve_sim.cli import app
from fineserve_sim.experiment import ConfigError, load_experiment
from fineserve_sim.planning.gpus import price_of
from fineserve_sim.planning.like import like
from fineserve_sim.planning.question import question

TEXT = """\
fineserve: 1
title: Models of one's own
cluster:
  count: 1
  gpu: {name: laptop, memory_gib: 4, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, pcie_bytes_per_s: 1.0e+9,
        efficiency: roofline-scaled, source: assumed}
engine: {block_tokens: 32, max_sequences: 16, token_budget: 256, context_bytes: 0}
models:
  - {id: A, model: {config: a/config.json}, precision: W16A16, rate_per_s: 4}
  - {id: B, model: llama-3.2-1b, precision: awq, rate_per_s: 4}
workload: {lengths: {prompt_tokens: 96, output_tokens: 48}, requests: 100}
slo: {ttft_s: 5.0}
systems: [fineserve]
runtime: {region_bytes: 16777216, models: {A: {path: a}, B: {path: b}}}
"""
CONFIG = """{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 2048}"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "config.json").write_text(CONFIG, encoding="utf-8")
    (folder / "file.yaml").write_text(TEXT, encoding="utf-8")
    rows = "".join(f"{i * 0.1:.1f},{60 + i % 7},{20 + i % 5},{'AB'[i % 2]}\n" for i in range(60))
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens,model\n" + rows, encoding="utf-8")
    return folder / "file.yaml"


def test_models_gpu_engines_and_runtime_are_taken_over(file: Path) -> None:
    taken = like(file)
    assert [(each.id, each.model, each.options) for each in taken.models] == [
        ("A", {"config": "a/config.json"}, (("W16A16", 1),)),
        ("B", "llama-3.2-1b", (("awq", 1),)),
    ]
    assert isinstance(taken.gpu, dict) and taken.gpu["name"] == "laptop"
    assert taken.kept["folder"] == str(file.parent)
    assert taken.kept["engine"]["token_budget"] == 256 and taken.kept["runtime"]["models"]["A"] == {"path": "a"}


def test_a_plan_like_a_file_is_an_experiment_anywhere(file: Path, tmp_path: Path) -> None:
    """Written into another folder, with models that lie beside the first file."""
    arguments = ["plan", str(tmp_path / "trace.csv"), "--like", str(file), "--gpus", "2", "--ttft-slo", "5"]
    result = CliRunner().invoke(app, [*arguments, "--evaluations", "4", "--jobs", "1", "--out", str(tmp_path / "else")])
    assert result.exit_code == 0, result.output + str(result.exception)
    path = tmp_path / "else" / "plan.yaml"
    setup = load_experiment(path).setup
    assert setup.models[0].spec.layers == 2 and setup.engine.token_budget == 256
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["runtime"] == yaml.safe_load(TEXT)["runtime"] and document["cluster"]["gpu"]["name"] == "laptop"
    assert {model for model, groups in document["systems"][0]["placement"]["groups"].items() if groups} == {"A", "B"}


def test_python_takes_a_file_as_well_and_names_its_gpu(file: Path, tmp_path: Path) -> None:
    found = fs.plan(tmp_path / "trace.csv", like=file, gpus=1, ttft_slo_s=5, evaluations=4, jobs=1)
    assert found.answer.startswith("On 1 laptop: ")
    assert found.experiment["runtime"] == yaml.safe_load(TEXT)["runtime"]


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ({"gpus": 1, "gpu": "l40s"}, {"gpu": "l40s", "count": 1}),
        (
            {"gpus": {"h100-sxm": 1, "l40s": 1}},
            {"nodes": [{"gpu": "h100-sxm", "count": 1}, {"gpu": "l40s", "count": 1}]},
        ),
    ],
)
def test_other_gpus_take_the_place_of_those_of_the_file(
    options: dict[str, Any], cluster: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    found = fs.plan(tmp_path / "trace.csv", like=file, **options, ttft_slo_s=5, evaluations=4, jobs=1)
    assert found.experiment["cluster"] == cluster
    assert found.experiment["engine"]["token_budget"] == 256


def test_a_file_with_several_kinds_of_gpus_needs_their_numbers(file: Path, tmp_path: Path) -> None:
    text = TEXT.replace("cluster:\n  count: 1\n  gpu: ", "cluster:\n  nodes:\n   - count: 1\n     gpu: ")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="--gpus 2: --like has GPUs of several kinds; name them, as in"):
        fs.plan(tmp_path / "trace.csv", like=file, gpus=2, ttft_slo_s=5)


def test_a_price_is_one_of_the_gpu_of_the_file(file: Path, tmp_path: Path) -> None:
    taken = like(file)
    rest = {"apart": (), "pin": {}, "most_per_gpu": None, "survive": None, "ttft_slo_s": 5}
    asked = question(tmp_path / "trace.csv", taken.models, taken, 2, [], {"": 0.5}, None, **rest)
    assert price_of(asked.wish.gpus, asked.wish.gpu, asked.prices) == 1.0


@pytest.mark.parametrize("options", [[], ["--like", "FILE", "--model", "a=llama-3.2-1b"]])
def test_models_come_from_one_place(options: list[str], file: Path, tmp_path: Path) -> None:
    given = [str(file) if option == "FILE" else option for option in options]
    arguments = ["plan", str(tmp_path / "trace.csv"), *given, "--gpus", "1", "--ttft-slo", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert "name each model, or take those of an experiment by --like FILE; one of the two" in str(result.exception)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("precision: awq,", "precision: awq, tp: auto,", "models.1.tp: auto; a plan needs a number of GPUs"),
        (
            "precision: awq,",
            "precision: awq, speculative: {tokens: 2, acceptance: 0.5},",
            "models.1.speculative: a plan knows no draft models",
        ),
    ],
)
def test_what_a_plan_cannot_be_like(old: str, new: str, said: str, file: Path) -> None:
    assert old in TEXT
    file.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        like(file)


def test_a_plan_is_like_no_file_with_ranks(tmp_path: Path) -> None:
    file = tmp_path / "ranks.yaml"
    models = "[{id: A, model: qwen3-30b-a3b, precision: fp16, dp: 2, rate_per_s: 1}]"
    workload = "{lengths: {prompt_tokens: 96, output_tokens: 48}, requests: 100}"
    rest = "slo: {ttft_s: 5.0}\nsystems: [dedicated]\ncluster: {gpu: h100-sxm, count: 2}\n"
    file.write_text(f"fineserve: 1\ntitle: Ranks\nmodels: {models}\nworkload: {workload}\n{rest}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"models\.0\.dp: a plan knows no data-parallel ranks"):
        like(file)
