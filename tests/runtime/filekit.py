"""Files of fineserve-run with model folders that have a config.json and nothing in their other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_engines import FakeHost
from fineserve_runtime.demo import write_files
from fineserve_runtime.engines.api import EngineHost, EngineListener, HostConfig

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def write_file(folder: Path, port: int = 0, bf16: dict[str, Any] | None = None) -> Path:
    """The demo's file over two model folders; ``bf16`` changes the first one's config.json."""
    for name, changes in (("bf16", bf16 or {}), ("fp8", {})):
        write_model(folder / name, changes)
    return write_files(folder, "bf16", "fp8", port).rename(folder / "file.yaml")


def write_model(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """A model's folder, with nothing in its weights and tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()


def start_fake(config: HostConfig, listener: EngineListener) -> EngineHost:
    return FakeHost(config, listener, step_s=0.0005)
