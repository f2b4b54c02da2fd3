"""How fast weights come to a GPU, by loader and medium: ServerlessLLM's measurements on one H100 machine.

    python benchmarks/loading.py [--data DIR]

A time is the model's bytes over a rate. The rate of each loader and medium is fitted on every other row, by least squares of
relative errors. The rows between give its errors. ``catalog/loading.yaml`` has the rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fineserve_sim import catalog

FILE = Path("fleets") / "sllm_loading" / "loading.csv"
MACHINE = "h100_2025"
MODELS: Mapping[str, str] = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "qwen2.5-32b",
}
NAMES: Mapping[tuple[str, str], str] = {
    ("sllm", "cached"): "serverlessllm-host",
    ("sllm", "random"): "serverlessllm-disk",
    ("safetensors", "cached"): "safetensors-host",
    ("safetensors", "random"): "safetensors-disk",
}


class Fitted(NamedTuple):
    """A rate, and the relative errors of the rows that did not give it."""

    name: str
    bytes_per_s: float
    errors: np.ndarray


def fitted(frame: pd.DataFrame) -> Iterator[Fitted]:
    """The rates by loader and medium. Models that the catalog does not have are left out."""
    rows = frame[(frame["gpu_set"] == MACHINE) & frame["model"].isin(MODELS)]
    half = catalog.precision("W16A16")
    sizes = {name: catalog.weight_bytes(catalog.model(own), half, 1) for name, own in MODELS.items()}
    for key, name in NAMES.items():
        mine = rows[(rows["format"] == key[0]) & (rows["mode"] == key[1])]
        size = mine["model"].map(sizes).to_numpy(dtype=np.float64)
        seconds = mine["loading_time_s"].to_numpy(dtype=np.float64)
        ratio = (size / seconds)[::2]  # least squares of 1 - size / (rate x seconds) over 1 / rate
        rate = float((ratio**2).sum() / ratio.sum())
        yield Fitted(name, rate, (size / rate / seconds - 1)[1::2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with fleets/")
    for name, rate, errors in fitted(pd.read_csv(parser.parse_args().data / FILE)):
        found = np.abs(errors)
        print(f"{name}: {rate / 1e9:.1f} GB/s, {100 * np.median(found):.1f} % off, {100 * found.max():.1f} % at most")


if __name__ == "__main__":
    main()
