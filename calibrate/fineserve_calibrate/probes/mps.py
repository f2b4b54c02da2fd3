"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU at the same time.

A daemon of our own in a folder of its own, ended with the probes; the compute mode of the GPU stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

from fineserve_calibrate.probes.backend import Unavailable

MPS = "nvidia-cuda-mps-control"
Environment = tuple[tuple[str, str], ...]


def _control(environment: Environment, *arguments: str, command: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MPS, *arguments],
        input=command,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def start_mps() -> Environment:
    """Start the daemon; the environment that makes a process use it. Raises Unavailable when it does not start."""
    if shutil.which(MPS) is None:
        raise Unavailable(f"{MPS} is not installed")
    folder = tempfile.mkdtemp(prefix="fineserve-mps-")
    environment = (("CUDA_MPS_PIPE_DIRECTORY", folder), ("CUDA_MPS_LOG_DIRECTORY", folder))
    started = _control(environment, "-d")
    if started.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise Unavailable(f"{MPS} does not start: {started.stderr.strip()[:200]}")
    return environment


def stop_mps(environment: Environment) -> None:
    """End the daemon and remove its folder."""
    _control(environment, command="quit\n")
    shutil.rmtree(dict(environment)["CUDA_MPS_PIPE_DIRECTORY"], ignore_errors=True)
