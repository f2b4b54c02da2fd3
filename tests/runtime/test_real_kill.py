"""An engine process is killed with requests under way: they go on, token by token, as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import Running
from realkit import NEEDS_VLLM
from runtimekit import LIKELY, Heard, assert_same_but_for_ties, eventually

pytestmark = NEEDS_VLLM

TOKENS = 300
KILLED_AT = 40


def test_streams_over_a_killed_and_a_stopped_engine_have_the_tokens_of_undisturbed_ones(tmp_path: Path) -> None:
    from fineserve_runtime.config import load_file
    from fineserve_runtime.demo import make_demo
    from fineserve_runtime.launch import launch
    from fineserve_runtime.serve import served_scenario

    changes = [("runtime.mode", "processes"), ("runtime.region_name", f"kill-{os.getpid()}")]
    changes += [("runtime.poison_freed", "true"), ("runtime.silent_s", "8")]
    file = load_file(make_demo(tmp_path, 0), changes)
    incidents: list[str] = []
    with launch(file, served_scenario(file, None), on_incident=lambda what, facts: incidents.append(what)) as running:
        undisturbed = _ask(running)
        eventually(lambda: all(each.end for each in undisturbed), 120)
        _disturb(running, undisturbed, signal.SIGKILL)
        eventually(lambda: incidents == ["engine died", "activated"], 60)
        incidents.clear()
        _disturb(running, undisturbed, signal.SIGSTOP)  # the watch has to notice
        # Stopped with the table's lock it keeps the other engine from it, which hangs as well until the stopped one is ended.
        eventually(lambda: [each for each in incidents if each != "engine hung"] == ["engine died", "activated"], 60)
        assert "engine hung" in incidents


def _disturb(running: Running, undisturbed: list[Heard], how: signal.Signals) -> None:
    disturbed = _ask(running)
    killed = disturbed[::2]  # those of the second model go on meanwhile
    eventually(lambda: all(len(each.tokens_) >= KILLED_AT for each in killed), 60)
    os.kill(_pid(running, "tiny-bf16"), how)
    eventually(lambda: all(each.end for each in disturbed), 180)
    assert all(len(each.tokens_) == TOKENS for each in undisturbed + disturbed), [each.end for each in disturbed]
    assert all(after.ends == 1 for after in disturbed)
    assert_same_but_for_ties(disturbed, undisturbed)


def _ask(running: Running) -> list[Heard]:
    """Six greedy requests, of both models in turn."""
    rng = random.Random(3)
    heard = []
    for number in range(6):
        prompt = tuple(rng.randrange(10, 250) for _ in range(20 + 15 * number))
        heard.append(_submit(running, ("tiny-bf16", "tiny-fp8")[number % 2], prompt))
    return heard


def _submit(running: Running, model: str, prompt: tuple[int, ...]) -> Heard:
    heard = Heard()
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, logprobs=LIKELY)
    running.driver.submit(lambda id: Job(id, model, prompt, sampling, heard, 60.0))
    return heard


def _pid(running: Running, model: str) -> int:
    from fineserve_runtime.engines.table import SlabTable

    (host,) = running.hosts.values()
    local = next(number for number, handle in host.engines.items() if handle.config.name == model)
    return int(SlabTable(host.table_path).counters[local].get("pid"))  # type: ignore[attr-defined]
