"""The campaign's rehearsal: the command itself, on this machine's CPU, with tiny models and real engines of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fineserve_calibrate.probes.engines import LLAMA_8B
from fineserve_calibrate.probes.torch_device import package_version
from fineserve_evidence.campaign.crew import settings
from fineserve_evidence.campaign.items import Take
from fineserve_evidence.campaign.plan import plan
from fineserve_evidence.campaign.record import opened
from fineserve_evidence.campaign.shapes.asleep import sleeper_settings

pytestmark = [
    pytest.mark.filterwarnings("default"),  # those libraries warn of themselves
    pytest.mark.skipif(package_version("vllm") == "none", reason="vllm is not installed"),
]
PARTS = "pairs-time_slice-bfloat16+bfloat16,pairs-mps,shapes,threes,driver,layouts,steps,runtime"
LEAST_STEPS = 8


def command(*arguments: str) -> str:
    """What ``fineserve-calibrate`` says."""
    run = subprocess.run(
        [sys.executable, "-m", "fineserve_calibrate.cli", *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a campaign in two commands: the second one goes on."""
    folder = tmp_path_factory.mktemp("campaign")
    given = ("campaign", "--gpu", "cpu", "--out", str(folder))
    first = command(*given, "--only", "driver,layouts", "--minutes", "1")
    assert "driver: 0 measured, 10 could not be: the CPU has no CUDA driver, 0 left" in first
    assert "complete: nothing is left" in command(*given, "--only", PARTS, "--minutes", "30")
    return folder / "campaign.tar.gz"


@pytest.fixture(scope="module")
def rows(packed: Path) -> Mapping[str, list[dict[str, Any]]]:
    """Rows by table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in opened(packed)[1]:
        found.setdefault(entry["table"], []).extend(entry["rows"])
    return found


def test_engines_ran_alone_and_beside_each_other(rows: Mapping[str, list[dict[str, Any]]]) -> None:
    sharing = rows["sharing"]
    assert all(row["repeats"] >= LEAST_STEPS and 1e-4 < row["latency_s"] < 10 for row in sharing)
    assert {row["neighbours"].count(" + ") for row in sharing if row["neighbours"] != "none"} == {0, 1}
    assert {row["processes"] for row in sharing} == {2, 3}
    alone = {
        (row["decodes"], row["prefill_tokens"]): row["latency_s"]
        for row in sharing
        if row["neighbours"] == "none" and row["processes"] == 2
    }
    assert alone[(0, 256)] > alone[(1, 0)]


def test_every_kind_of_item_was_measured_or_is_lacking_here(packed: Path, rows: Mapping[str, Any]) -> None:
    assert {table for table, found in rows.items() if found} == {"sharing", "step", "trials"}
    manifest = opened(packed)[2]
    reasons = {reason for part in manifest["parts"].values() for reason in part["reasons"]}
    lacking = {"MPS is NVIDIA's", "the CPU has no CUDA driver", "layouts are those of vLLM's caches on a GPU"}
    lacking |= {"NCCL is NVIDIA's", "vLLM's engines sleep on GPUs alone", "the CPU has no device memory"}
    slow = {reason for reason in reasons if "steps side by side" in reason}  # of a machine with other work
    assert reasons - slow == lacking
    assert {row["trial"] for row in rows["trials"]} == {"check", "demo", "replay", "overhead", "gloo", "graphs"}
    (said,) = (row["text"] for row in rows["trials"] if row["trial"] == "demo")
    assert "40 requests" in said and "0 failed" in said
    trials = {(row["trial"], row["quantity"]): row.get("value", 0.0) for row in rows["trials"]}
    assert trials[("replay", "ttft_attainment")] > 0
    assert trials[("overhead", "slab_us_1")] > 100 and trials[("overhead", "stock_us_1")] > 100


def test_the_report_of_the_rehearsal(packed: Path) -> None:
    assert "report.md" in command("report", str(packed))
    text = (packed.parent / "campaign" / "report.md").read_text(encoding="utf-8")
    for heading in ("What to commit", "Several engines on the device", "Steps of one engine", "The runtime"):
        assert f"## {heading}\n" in text
    assert "### The replay beside the simulator" in text and "could not be simulated" not in text
    assert "| throughput_per_s |" in text


def test_vllm_takes_what_a_gpus_engines_are_given(tmp_path: Path) -> None:
    """Names of arguments, and how graphs are asked for, by the classes of the vLLM that is installed."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    scenes = {item.part: item.ask.scene for item in plan(False, LLAMA_8B.name) if isinstance(item.ask, Take)}
    known = {field.name for field in fields(EngineArgs)}
    assert set(sleeper_settings(LLAMA_8B)["arguments"]) <= known
    for scene in scenes.values():
        for place in range(len(scene.seats)):
            given = settings(scene, place, LLAMA_8B, on_cpu=False, mps=())
            assert set(given["arguments"]) <= known
            (tmp_path / "config.json").write_text(json.dumps(given["config"]), encoding="utf-8")
            EngineArgs(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **given["arguments"])
            graphs = given["arguments"].get("compilation_config")
            if graphs:
                parsed = CompilationConfig(**graphs)
                assert not parsed.cudagraph_mode.requires_piecewise_compilation()
                assert parsed.cudagraph_mode.has_full_cudagraphs()
