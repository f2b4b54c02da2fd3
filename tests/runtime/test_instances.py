"""Several engines of one model under the dispatcher of the core, on fake engines: vLLM (DP) as the simulator has it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fake_engines import continuation
from filekit import write_file
from fineserve_runtime.config import load_file
from fineserve_runtime.core import Core
from fineserve_runtime.replay_log import replay
from runtimekit import BLOCK_TOKENS, core_spec, eventually, runtime

from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.systems.spec import (
    DispatchSpec,
    FreenessDispatchSpec,
    LeastLoadedDispatchSpec,
    RoundRobinDispatchSpec,
)

POLICIES: list[DispatchSpec] = [RoundRobinDispatchSpec(), LeastLoadedDispatchSpec(), FreenessDispatchSpec()]


@pytest.mark.parametrize("dispatch", POLICIES, ids=lambda spec: spec.policy)
def test_all_requests_end_with_their_tokens_and_the_log_replays(dispatch: DispatchSpec) -> None:
    rng = random.Random(3)
    with runtime(core_spec(("A",), dispatch=dispatch, gpus=3, blocks=40), max_sequences=6) as here:
        asked = []
        for _ in range(60):
            prompt = tuple(rng.randrange(2, 200) for _ in range(rng.randrange(4, 200)))
            tokens = rng.randrange(1, 40)
            asked.append((prompt, tokens, here.ask("A", prompt, tokens=tokens)[1]))
            for host in rng.sample(sorted(here.hosts), 2):
                here.hosts[host].step_all()
        here.run()
        for prompt, tokens, heard in asked:
            assert heard.tokens_ == continuation(prompt, tokens)
        assert all(host.engines[0].submitted for host in here.hosts.values())
        assert here.driver.wait_empty(0)
    log = [json.loads(json.dumps(entry)) for entry in here.log]
    result = replay(log)
    assert result.difference is None
    assert result.commands == {"Dispatch": 60}


def test_a_request_goes_where_the_least_of_the_memory_is_wanted() -> None:
    """A prompt of ten blocks goes to the first engine; three of one block go to the others before it gets one more."""
    with runtime(core_spec(("A",), dispatch=LeastLoadedDispatchSpec(), gpus=3)) as here:
        here.ask("A", tuple(range(2, 2 + 10 * BLOCK_TOKENS)))
        for _ in range(4):
            here.ask("A", (5, 6, 7))
        assert [len(host.engines[0].submitted) for host in here.hosts.values()] == [1, 2, 2]
        here.run()
        here.ask("A", (5, 6, 7))
        assert [len(host.engines[0].submitted) for host in here.hosts.values()] == [2, 2, 2]


def test_running_requests_count_as_far_as_they_hold_memory() -> None:
    with runtime(core_spec(("A",), dispatch=LeastLoadedDispatchSpec(), gpus=2)) as here:
        long, _ = here.ask("A", tuple(range(2, 2 + 3 * BLOCK_TOKENS)), tokens=100)
        while here.hosts[0].engines[0].state().prefill_tokens:
            here.hosts[0].step_all()
        assert long.first_token_s is not None
        for _ in range(2):
            here.ask("A", (5, 6, 7))
        assert [len(host.engines[0].submitted) for host in here.hosts.values()] == [1, 2]


def test_requests_of_a_dead_instance_go_on_at_another_and_it_starts_again() -> None:
    with runtime(core_spec(("A",), dispatch=RoundRobinDispatchSpec(), gpus=2)) as here:
        asked = [here.ask("A", tokens=6)[1] for _ in range(8)]
        here.hosts[0].step_all()
        here.hosts[0].kill(0)
        assert len(here.hosts[1].engines[0].submitted) == 8
        eventually(lambda: here.run() and all(heard.end for heard in asked))
        assert all(heard.tokens_ == continuation((5, 6, 7), 6) for heard in asked)
        eventually(lambda: here.driver.health("A").condition == "ready" and len(here.commands("Activate")) == 1)
        eventually(lambda: here.hosts[0].engines[0].alive)
        eventually(lambda: any(entry.get("event") == "EngineReady" for entry in here.log))
        before = len(here.hosts[0].engines[0].submitted)
        for _ in range(2):
            here.ask("A")
        assert len(here.hosts[0].engines[0].submitted) == before + 1
        here.run()
    assert replay([json.loads(json.dumps(entry)) for entry in here.log]).difference is None


def test_with_all_instances_dead_requests_wait_for_the_first_that_is_back() -> None:
    with runtime(core_spec(("A",), dispatch=LeastLoadedDispatchSpec(), gpus=2)) as here:
        here.hosts[0].kill(0)
        here.hosts[1].kill(0)
        eventually(lambda: here.driver.health("A").condition in ("starting", "ready"))
        _, heard = here.ask("A", tokens=3)
        eventually(lambda: here.run() and heard.end is not None)
        assert heard.tokens_ == continuation((5, 6, 7), 3)


def test_a_prompt_that_no_instance_holds_is_rejected_at_once() -> None:
    with runtime(core_spec(("A",), dispatch=LeastLoadedDispatchSpec(), gpus=2, max_tokens=64)) as here:
        _, heard = here.ask("A", tuple(range(2, 80)))
        assert heard.end is not None and heard.end[:2] == ("refused", "rejected")


def test_a_core_with_dispatch_has_one_model() -> None:
    with pytest.raises(ValueError, match="serves one model; here are 2"):
        Core(core_spec(("A", "B"), dispatch=RoundRobinDispatchSpec()))


def test_a_file_of_two_models_has_no_system_with_dispatch(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    with pytest.raises(ConfigError, match=r"systems\.0: vllm-dp serves one model; models has 2"):
        load_file(path, [("systems", "[vllm-dp]")])
