"""Readers of latency tables that others published, and the options of the commands that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

SYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        "h100_sxm": "h100-sxm",
        "h200_sxm": "h200-sxm",
        "a100_sxm": "a100-80gb",
        "l40s": "l40s",
        "b200_sxm": "b200",
        "rtx_pro_6000_server": "rtx-pro-6000-server",
    }
)
"""The systems of ``aiconfigurator-core`` whose tables can be imported, and the GPUs of the catalog that they are."""

WheelOption = Annotated[
    str, typer.Option(help="Wheel file of aiconfigurator-core, folder of its repository's systems, or 'installed'.")
]
SystemOption = Annotated[str, typer.Option(help=f"One of {', '.join(SYSTEMS)}.")]
BackendOption = Annotated[str, typer.Option(help="vllm, trtllm or sglang.")]
Int4Option = Annotated[
    Path | None, typer.Option(help="CSV file with int4_wo GEMM rows (gemm_perf of aiconfigurator 0.5.0).")
]
