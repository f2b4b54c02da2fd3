"""The fake core of the chaos campaign has its KV in the shared region: right when memory is, and wrong when it is not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fake_engines import continuation
from filekit import CONFIG
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Sampling, StepReport, Submission
from fineserve_runtime.engines.device import LocalDevice
from fineserve_runtime.engines.host import Host, start_host
from leased_core import LeasedCore
from runtimekit import eventually

REQUESTS = 24
TOKENS = 60


class Heard:
    """A listener that keeps tokens. ``on_report`` is told first."""

    def __init__(self, on_report: Any = lambda report: None) -> None:
        self._on_report = on_report
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ended = 0
        self.preempted = 0

    def on_step(self, report: StepReport) -> None:
        self._on_report(report)
        self.preempted += len(report.preempted)
        for chunk in report.chunks:
            self.tokens.setdefault((report.engine, chunk.request_id), []).extend(chunk.token_ids)
            self.ended += chunk.finish_reason is not None

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        raise AssertionError(reason)


@contextmanager
def started(folder: Path, heard: Heard) -> Iterator[Host]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineConfig("A", folder, block_tokens=16, max_sequences=8, max_batched_tokens=64, max_model_len=256)
    engines = (engine, replace(engine, name="B", kv_cache_dtype="fp8_e4m3"))
    config = HostConfig(engines, 48 * 4096, region_dir=folder, weights_in_region=True, poison_freed=True)
    host = start_host(config, heard, partial(LocalDevice, build=LeasedCore))
    try:
        yield host
    finally:
        host.close()


def submit(host: Host) -> None:
    for number in range(REQUESTS):
        for handle in host.engines.values():
            handle.submit(Submission(number, prompt(number), Sampling(max_tokens=TOKENS, ignore_eos=True)))


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(5 + number, 40 + number))


def test_tokens_are_right_while_engines_take_memory_from_one_another(tmp_path: Path) -> None:
    all_there = threading.Event()
    heard = Heard(lambda report: all_there.wait(60))  # the thread of both engines waits for what it tells
    with started(tmp_path, heard) as host:
        free = host.ledger().free_bytes
        submit(host)
        all_there.set()
        eventually(lambda: heard.ended == 2 * REQUESTS)
        assert heard.preempted > 0, "memory was never short"
        for (_, number), tokens in heard.tokens.items():
            assert tokens == continuation(prompt(number), TOKENS)
        eventually(lambda: host.ledger().free_bytes == free)


def test_bytes_that_somebody_else_wrote_show_in_the_tokens(tmp_path: Path) -> None:
    def spoil(report: StepReport) -> None:
        if report.decodes:
            (region,) = tmp_path.glob("*.kv")
            with region.open("r+b") as file:
                file.write(b"\xff" * region.stat().st_size)

    heard = Heard(spoil)
    with started(tmp_path, heard) as host:
        submit(host)
        eventually(lambda: heard.ended == 2 * REQUESTS)
    wrong = [number for (_, number), tokens in heard.tokens.items() if tokens != continuation(prompt(number), TOKENS)]
    assert len(wrong) > REQUESTS


def test_the_figures_of_an_engine_that_was_removed_are_zero(tmp_path: Path) -> None:
    """Whoever lists the engines may look at one a moment later: the scrape of a metric, or the tick of a driver."""
    with started(tmp_path, Heard()) as host:
        handle, other = host.engines.values()
        held = handle.stats().weight_bytes
        assert held and handle.state().free_kv_tokens
        host.remove(handle.id)
        assert list(host.engines) == [other.id]
        assert set(handle.stats()) == {0} and handle.state().running == 0
