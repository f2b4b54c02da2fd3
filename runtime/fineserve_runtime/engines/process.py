"""What runs in an engine's own process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import EngineConfig
from fineserve_runtime.engines.links import PipeInbox
from fineserve_runtime.engines.loop import EngineLoop, Message
from fineserve_runtime.engines.model_files import read_config
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.vllm_engine import SteppedCore, prepare_environment, slab_arguments
from fineserve_runtime.engines.vllm_engine import build_core as build_vllm_core


def build_slab_core(
    config: EngineConfig, model_dir: Path, settings: SlabSettings, region_bytes: int, eos_token_ids: tuple[int, ...]
) -> SteppedCore:
    """An engine over the slab region, in this process."""
    read_config(model_dir)  # vLLM would ask a hub for a folder that is gone
    prepare_environment()
    if (
        settings.device == "cpu"
    ):  # before vLLM is imported: the first request with logprobs would compile for ten seconds
        import torch

        torch._dynamo.config.disable = True
    from fineserve_runtime.engines.vllm_seams import check_contract

    check_contract()
    core = build_vllm_core(slab_arguments(config, model_dir, settings, region_bytes))
    return SteppedCore(core, settings.engine, eos_token_ids)


BuildCore = Callable[[EngineConfig, Path, SlabSettings, int, tuple[int, ...]], Any]
"""What makes the core of an engine in the process where it steps."""


def main(
    connection: Connection,
    build_core: BuildCore,
    config: EngineConfig,
    model_dir: Path,
    settings: SlabSettings,
    region_bytes: int,
    eos_token_ids: tuple[int, ...],
) -> None:
    """Serve one engine until told to stop or the host is gone. In a session of its own: signals to the host's process group,
    from a terminal or a supervisor, are the host's business, which then drains its engines."""
    os.setsid()
    multiprocessing.current_process().daemon = False  # ranks are processes of their own below it
    sending = threading.Lock()

    def emit(message: Message) -> None:
        with sending:
            connection.send(message)

    def build() -> Any:
        return build_core(config, model_dir, settings, region_bytes, eos_token_ids)

    with contextlib.suppress(EOFError, BrokenPipeError):
        EngineLoop({settings.engine: build}, PipeInbox(connection), emit).run()
