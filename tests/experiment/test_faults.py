"""Faults in an experiment file: from YAML to the run, and mistakes at their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fineserve_sim.cluster import Fault
from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment
from fineserve_sim.experiment.show.timelines.stored import stored_run

FILE = """\
fineserve: 1
title: An instance fails
cluster: {gpu: a800, count: 4, gpus_per_node: 1}
models:
  - {id: A, model: qwen2.5-14b, precision: fp16, rate_per_s: 5}
workload: {lengths: {prompt_tokens: 512, output_tokens: 64}, requests: 110}
slo: {ttft_s: 2.0}
faults:
  - {time_s: 5, instance: 2, repair_s: 6}
  - {time_s: 20, instance: 2}
systems: [vllm-dp, vllm-pp]
sweeps:
  - {name: time, axes: {faults.0.time_s: [5, 6]}}
seeds: 1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "faulty.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_instance_is_away_from_its_fault_to_its_repair(tmp_path: Path) -> None:
    run_experiment(written(tmp_path, FILE), tmp_path / "out", jobs=1, decisions=True)
    for at_s in (5, 6):
        run = stored_run(tmp_path / "out", "vllm-dp", at={"faults.0.time_s": str(at_s)})
        used = {float(time_s): row for time_s, row in zip(run.data.sample_s, run.data.kv_used_bytes, strict=True)}
        away = [time_s for time_s in used if at_s < time_s < at_s + 6 or time_s > 20]
        assert away and all(used[time_s][2] == 0 for time_s in away)
        assert any(used[time_s][2] > 0 for time_s in used if time_s < at_s)
        assert any(used[time_s][2] > 0 for time_s in used if at_s + 6 < time_s < 20)
        assert (run.data.fate == 1).all()
        of_faults = ("EngineFailed", "GpusRepaired")
        told = [(entry["now_s"], entry["event"]) for entry in run.decisions() if entry.get("event") in of_faults]
        assert told == [(at_s, "EngineFailed"), (at_s + 6, "GpusRepaired"), (20, "EngineFailed")]


FLEET = """\
fineserve: 1
title: A GPU fails under models that come and go
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: fp16, rate_per_s: 3}
  - {id: B, model: llama-3.2-3b, precision: fp16, rate_per_s: 3}
workload: {lengths: {prompt_tokens: 512, output_tokens: 64}, requests: 240}
slo: {ttft_s: 2.0}
faults:
  - {time_s: 10, gpu: 0, repair_s: 15}
systems: [prism]
seeds: 1
"""


def test_models_of_a_lost_gpu_come_back_on_another(tmp_path: Path) -> None:
    run_experiment(written(tmp_path, FLEET), tmp_path / "out", jobs=1, decisions=True)
    run = stored_run(tmp_path / "out", "prism")
    assert (run.data.fate == 1).all()
    told = list(run.decisions())
    (lost,) = (entry for entry in told if entry.get("event") == "EngineFailed")
    (back, *_) = (entry for entry in told if entry.get("command") == "Activate" and entry["now_s"] >= 10)
    assert lost["now_s"] == back["now_s"] == 10 and lost["lost"] == [0] and back["gpus"] == [1]
    again = [entry for entry in told if entry.get("event") == "RequestReturned"]
    assert again and all(entry["now_s"] == 10 for entry in again)
    assert not any(entry.get("gpus") == [0] for entry in told if 10 <= entry["now_s"] < 25)


def test_what_the_file_says_is_what_fails(tmp_path: Path) -> None:
    plain = load_experiment(written(tmp_path, FILE.replace("repair_s: 6", "repair_s: 7")), [("sweeps", "[]")])
    assert plain.setup_of(plain.points[0]).faults == (Fault(5, 2, 7), Fault(20, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "vllm-pp]",
            '"static*"]',
            r"yaml:9: faults.0: system static\* keeps its engines: faults are for clusters of one model",
        ),
        (
            "vllm-pp]",
            "prism]",
            r"yaml:9: faults.0: system prism loses one gpu at a time; say which by gpu, not by instance",
        ),
        ("instance: 2}", "gpu: 2}", r"yaml:10: faults.1: system vllm-dp loses one instance"),
        ("instance: 2}", "instance: 2, gpu: 2}", r"yaml:10: faults.1: say what is lost: an instance of"),
        ("instance: 2}", "instance: 4}", r"yaml:10: faults.1: there is no serving instance 4; expected 0 to 3"),
        ("repair_s: 6}", "repair_s: 15.5}", r"faults.1: instance 2 is lost at 5 s and not back at 20 s"),
        ("repair_s: 6}", "repair: 6}", r'yaml:9: faults.0.repair: unknown key; did you mean "repair_s"'),
        ("time_s: 20", "time_s: -1", r"yaml:10: faults.1.time_s: "),
        ("[5, 6]", "[5, 20]", r"yaml:9: faults.0: instance 2 is lost at 20 s and not back at 20 s"),
    ],
)
def test_mistakes_are_named_at_their_lines(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(written(tmp_path, FILE.replace(old, new)))
