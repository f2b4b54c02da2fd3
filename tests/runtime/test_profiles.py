"""Policies that need profiles, on fake engines: they are made of the steps that were measured."""

from __future__ import annotations

import json
import random

import pytest
from fake_engines import continuation
from fineserve_runtime.core import Core, LoadFacts, measured_profile
from fineserve_runtime.replay_log import replay
from fineserve_runtime.step_times import MeasuredStep, StepTimes
from runtimekit import core_spec, eventually, runtime

from fineserve_sim.systems.spec import (
    DriftingResidencySpec,
    FcfsSpec,
    MooreHodgsonSpec,
    QlmResidencySpec,
    ResidencySpec,
    SchedulerSpec,
)

LOAD = LoadFacts(prompt_tokens=40, output_tokens=11, max_sequences=4)
BASE_S, TOKEN_S, DECODE_S = 0.002, 1e-5, 3e-4
EXACT = tuple(
    MeasuredStep(new, decodes, BASE_S + TOKEN_S * new + DECODE_S * decodes)
    for new, decodes in ((8, 0), (64, 0), (0, 1), (0, 4))
)


def test_a_profile_is_that_of_the_linear_steps() -> None:
    """Budget 64, prompts of 40 tokens and 10 decodes. A request that joins b - 1 others adds its tokens to one of their steps,
    less than the decode that they would have had; alone it takes a step of its own."""
    facts = core_spec(("A",)).models[0]
    points = measured_profile(facts, LOAD, StepTimes(64, EXACT), 64)
    assert [point.batch for point in points] == [1, 2, 4]
    decode_s = {batch: BASE_S + DECODE_S * batch for batch in (1, 2, 4)}
    prompt_s = BASE_S + 40 * TOKEN_S
    assert points[0].throughput_per_s == pytest.approx(1 / (10 * decode_s[1] + prompt_s))
    for point in points[1:]:
        stay_s = 11 * decode_s[point.batch] + point.batch * 40 * TOKEN_S
        assert point.throughput_per_s == pytest.approx(point.batch / stay_s)
    assert points[0].ttft_s == pytest.approx(prompt_s)
    assert points[2].ttft_s == pytest.approx(3 * BASE_S + 160 * TOKEN_S)  # in steps of 64
    assert points[2].kv_bytes == 4 * 48 * facts.token_bytes  # 45 tokens are three blocks


@pytest.mark.parametrize("residency", [QlmResidencySpec(), DriftingResidencySpec()], ids=lambda spec: spec.policy)
def test_without_a_load_there_is_no_profile(residency: ResidencySpec) -> None:
    with pytest.raises(ValueError, match="model A has no profile"):
        Core(core_spec(("A",), residency=residency))


@pytest.mark.parametrize(
    ("scheduler", "residency", "commands"),
    [
        (FcfsSpec(), QlmResidencySpec(swap_s=0.0, tick_s=0.02), {"Activate", "Evict"}),
        (MooreHodgsonSpec(), DriftingResidencySpec(idle_s=0.0, replace_s=0.05, tick_s=0.02), {"Activate", "Evict"}),
    ],
    ids=["qlm", "drifting"],
)
def test_models_take_turns_and_every_text_is_right(
    scheduler: SchedulerSpec, residency: ResidencySpec, commands: set[str]
) -> None:
    """Memory has room for one model's weights and some KV, so that three models swap on one device."""
    spec = core_spec(
        ("A", "B", "C"),
        scheduler=scheduler,
        residency=residency,
        weight_bytes=16 * 1024,
        blocks=24,
        resident=("A",),
        measured=EXACT,
        load=LOAD,
    )
    rng = random.Random(2)
    with runtime(spec) as here:
        asked = []
        for _ in range(60):
            prompt = tuple(rng.randrange(2, 200) for _ in range(rng.randrange(4, 60)))
            tokens = rng.randrange(1, 12)
            asked.append((prompt, tokens, here.ask(rng.choice("ABC"), prompt, tokens=tokens, slo_s=100.0)[1]))
        eventually(lambda: here.run() and all(heard.end for _, _, heard in asked))
        for prompt, tokens, heard in asked:
            assert heard.tokens_ == continuation(prompt, tokens)
        assert here.driver.wait_empty(0)
        assert commands <= {entry["command"] for entry in here.log if "command" in entry}
    assert replay([json.loads(json.dumps(entry)) for entry in here.log]).difference is None


def test_a_model_moves_to_the_empty_device_when_that_pays() -> None:
    """Both are on device 0, and are asked for more than one device can do."""
    spec = core_spec(
        ("A", "B"),
        scheduler=MooreHodgsonSpec(),
        residency=DriftingResidencySpec(replace_s=0.2, tick_s=0.05),
        weight_bytes=8 * 1024,
        blocks=64,
        gpus=2,
        measured=EXACT,
        slo_s=0.02,
        load=LOAD,
    )
    spec = spec.model_copy(update={"stays": spec.stays[:2]})
    with runtime(spec) as here:
        asked = []

        def moved() -> bool:
            asked.extend(here.ask(model, tokens=10, slo_s=100.0)[1] for model in "AB")
            here.run()
            return bool(here.commands("Activate"))

        eventually(moved)
        assert here.commands("Activate")[0]["gpus"] == [1]
        eventually(lambda: here.run() and all(heard.end for heard in asked))
        assert all(heard.tokens_ == continuation((5, 6, 7), 10) for heard in asked)
    assert replay([json.loads(json.dumps(entry)) for entry in here.log]).difference is None
