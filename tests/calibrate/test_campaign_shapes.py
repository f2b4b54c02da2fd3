"""What two shapes of a model need of a GPU, on fakes: memory in two processes, an engine that sleeps, groups, the report."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import count, takewhile
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from fineserve_calibrate.probes.engines import LLAMA_8B, TINY
from fineserve_calibrate.probes.nvidia import Driver
from fineserve_calibrate.probes.schema import Unavailable
from fineserve_evidence.campaign import trials
from fineserve_evidence.campaign.command import plan_lines
from fineserve_evidence.campaign.items import Spot, Trial
from fineserve_evidence.campaign.plan import CPU, GPU, PAGE, plan
from fineserve_evidence.campaign.report import _copy, _vmm
from fineserve_evidence.campaign.shapes import asleep, groups, handles, second
from fineserve_evidence.campaign.shapes.second import Work, guarded, heard
from fineserve_evidence.campaign.trial_runs import shapes
from fineserve_evidence.campaign.trials import run_trial
from fineserve_runtime.engines.region import CpuRegion

ITEMS = plan(False, LLAMA_8B.name)
SHAPES = [item for item in ITEMS if item.part == "shapes"]

# --- the plan ---------------------------------------------------------------------------------------------------------


def test_shapes_are_measured_in_the_first_ten_minutes_of_a_gpu() -> None:
    seconds, setups = 0.0, set[str]()
    for item in takewhile(lambda item: item != SHAPES[-1], ITEMS):
        seconds += item.expected_s + (0.0 if item.setup in setups else item.setup_s)
        setups.add(item.setup)
    assert seconds + SHAPES[-1].expected_s < 9 * 60
    assert 90 <= sum(item.expected_s for item in SHAPES) <= 150
    assert not any(item.setup for item in SHAPES)  # each can fail alone


def test_each_of_the_five_is_asked() -> None:
    asked = {item.ask.name for item in SHAPES if isinstance(item.ask, Trial)}
    assert asked == {"ipc", "handles", "nccl", "gloo", "graphs", "asleep"} == set(CPU.shapes)
    points = [(item.ask.operator, item.ask.point) for item in SHAPES if isinstance(item.ask, Spot)]
    layer = sum(2 * prod(shape) for shape in shapes(dict(LLAMA_8B.config)).values() if len(shape) > 1)
    assert layer == GPU.layer_bytes == 436_207_616
    calls = {(point["call"], point["bytes"], point["count"], point["load"]) for name, point in points if name == "vmm"}
    sizes = ((PAGE, 208), (layer, 1))
    assert calls == {
        (call, *size, load) for call in ("map", "set_access", "unmap") for size in sizes for load in ("idle", "kernel")
    }
    copies = {(point["direction"], point["bytes"]) for name, point in points if name == "copy"}
    assert copies == {("device_to_host", layer), ("host_to_device", layer)}


@pytest.mark.parametrize("name", ["ipc", "handles", "nccl", "asleep"])
def test_what_a_cpu_lacks_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"CUDA driver|NVIDIA|GPUs alone"):
        run_trial(Trial(name, TINY.name), tmp_path, None)


def test_a_trial_of_shapes_is_a_process_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(*given: Any) -> str:
        asked.append(given)
        return 'a word of a library\n{"make_s": 0.5}\n'

    monkeypatch.setattr(trials, "ended", fake)
    rows = run_trial(Trial("ipc", LLAMA_8B.name), tmp_path, "h100-sxm")
    assert rows == [{"trial": "ipc", "quantity": "make_s", "value": 0.5}]
    ((command, log, limit_s),) = asked
    assert command == ["fineserve_evidence.campaign.shapes", "ipc", LLAMA_8B.name, "cuda"]
    assert log == tmp_path / "trials" / "ipc.log" and limit_s < trials.LIMIT_S


# --- two processes ----------------------------------------------------------------------------------------------------


def test_what_fails_in_another_process_is_the_reason() -> None:
    with (
        second.second(int) as pipe,
        pytest.raises(RuntimeError, match=r"in the second process: TypeError: int\(\) arg"),
    ):
        heard(pipe)


def test_a_process_that_ends_or_says_nothing_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "LIMIT_S", 0.0)
    pipe, its = multiprocessing.Pipe()
    with pytest.raises(RuntimeError, match="said nothing in 0 s"):
        heard(pipe)
    its.close()
    with pytest.raises(RuntimeError, match="ended without a word"):
        heard(pipe)
    pipe.close()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process is a thread, contexts take nothing to make, and each look finds a MiB more in use."""

    @contextmanager
    def thread(work: Work, *given: object) -> Iterator[Connection]:
        pipe, its = multiprocessing.Pipe()
        other = Thread(target=guarded, args=(work, its, *given))
        other.start()
        yield pipe
        pipe.close()
        other.join(10)
        its.close()
        assert not other.is_alive()

    used = count(0, 2**20)
    for module in (handles, groups):
        monkeypatch.setattr(module, "second", thread)
    for name, value in (("has_context", lambda: None), ("used_bytes", lambda: next(used))):
        monkeypatch.setattr(handles, name, value)
        monkeypatch.setattr(asleep, name, value)


class SharedMemory:
    """A libcuda whose handles are memory of this process. An exported file is a pipe's end; its number is kept."""

    def __init__(self) -> None:
        self.made: list[bytearray] = []
        self.exported: dict[tuple[int, int], int] = {}
        self.mapped: dict[int, int] = {}
        self.wrong: list[str] = []
        self._next = count(2**40, 2**32)

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        if properties._obj.handle_types != 1:
            self.wrong.append("a handle that cannot be exported")
        self.made.append(bytearray(size.value))
        handle._obj.value = len(self.made) - 1
        return 0

    def cuMemExportToShareableHandle(self, file: Any, handle: Any, kind: Any, flags: Any) -> int:
        file._obj.value = os.memfd_create("page")
        self.exported[_identity(file._obj.value)] = handle.value
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, file: Any, kind: Any) -> int:
        handle._obj.value = self.exported[_identity(file.value)]
        os.close(file.value)
        return 0

    def cuMemAddressReserve(self, address: Any, *_: Any) -> int:
        address._obj.value = next(self._next)
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        self.mapped[address.value] = handle.value
        return 0

    def cuMemsetD8_v2(self, address: Any, byte: Any, size: Any) -> int:
        for start in range(address.value, address.value + size.value, PAGE):
            page = self.made[self.mapped[start]]
            page[:] = bytes([byte.value]) * len(page)
        return 0

    def cuMemcpyDtoH_v2(self, host: Any, address: Any, size: Any) -> int:
        start = max(start for start in self.mapped if start <= address.value)
        host[0] = bytes(self.made[self.mapped[start]][address.value - start : address.value - start + 1])
        return 0

    def __getattr__(self, name: str) -> Any:
        if name in ("cuInit", "cuMemSetAccess"):
            return lambda *_: 0
        raise AttributeError(name)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def test_pages_are_exported_and_mapped_by_another(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SharedMemory()
    monkeypatch.setattr(handles, "load_driver", lambda: Driver(library))
    found = handles.pages()
    assert {"export_s", "import_s", "map_s"} <= {name for name, value in found.items() if value > 0}
    assert found["our_byte_is_there"] == found["its_byte_is_here"] == 1.0
    assert library.wrong == [] and len(library.made) == handles.PAGES
    assert len(library.mapped) == 2 * handles.PAGES  # in both processes


def test_the_runtimes_region_is_opened_by_another(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of CUDA's memory, which is what the runtime's region is on a CPU."""
    name = "fineserve_runtime.engines.torch_region"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(CudaRegion=CpuRegion))  # type: ignore[arg-type]
    monkeypatch.setattr(handles, "REGION_BYTES", 2**14)
    found = handles.ipc()
    assert found["make_s"] > 0 and found["open_s"] > 0
    assert found["our_byte_is_there"] == found["its_byte_is_here"] == 1.0
    assert found["context_bytes"] == found["opened_bytes"] == 2**20


# --- groups and engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_groups_of_two_ranks_take_two_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: gpus))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(groups, "made", lambda backend, ranks: {f"{backend} {ranks}": 1.0})
    assert list(groups.nccl()) == (["nccl 1"] if gpus == 1 else ["nccl 1", "nccl 2"])


def test_the_slowest_rank_says_when_a_group_is_made(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(pipe: Connection, rank: int, backend: str, ranks: int, store: str) -> None:
        pipe.send(True)
        pipe.recv()
        pipe.send({"first_s": 1.0 + rank, "next_bytes": 7.0 - rank})
        pipe.recv()

    monkeypatch.setattr(groups, "join", join)
    assert groups.made("gloo", 3) == {"3_ranks_first_s": 3.0, "3_ranks_next_bytes": 7.0}


SLEEPER = """
import json, sys
print(json.dumps({"import_s": 0.5}), flush=True)
sys.stdin.readline()
print(json.dumps({"start_s": 1.5}), flush=True)
level = 0
for line in sys.stdin:
    asked = json.loads(line)
    if level and "sleep" in asked:
        print(json.dumps({"error": "RuntimeError: asleep already"}), flush=True)
    level = asked.get("sleep", 0)
    print(json.dumps({"seconds": 0.25 * (1 + level)}), flush=True)
"""


def test_an_engine_is_measured_awake_and_asleep(here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scripted_sleeper.py").write_text(SLEEPER, encoding="utf-8")
    monkeypatch.setattr(asleep.Sleeper, "worker", "scripted_sleeper")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = asleep.residue(LLAMA_8B)
    assert {name: found[name] for name in ("sleep_1_s", "wake_1_s", "sleep_2_s")} == {
        "sleep_1_s": 0.5,
        "wake_1_s": 0.25,
        "sleep_2_s": 0.75,
    }
    sizes = [found[f"{state}_bytes"] / 2**20 for state in ("awake", "asleep_1", "asleep_2")]
    assert sizes == [1.0, 2.0, 3.0]  # the next look each


def test_the_log_of_an_engine_that_fails_is_kept(
    here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import sys\nprint('no allocator, says a library', file=sys.stderr)\n"
    (tmp_path / "scripted_sleeper.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(asleep.Sleeper, "worker", "scripted_sleeper")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Unavailable, match="the engine's process ended: no allocator"):
        asleep.residue(LLAMA_8B)
    assert "no allocator, says a library" in capsys.readouterr().err


def test_the_engine_that_sleeps_is_one_of_the_pairs() -> None:
    given = asleep.sleeper_settings(LLAMA_8B)["arguments"]
    assert given["enable_sleep_mode"] and not given["enforce_eager"]
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [1, 32, 256]


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_layer_is_reported_as_a_whole() -> None:
    """Hand-worked: 208 pages at 10 + 20 us each are 6.24 ms, and unmapping them at 5 us 1.04 ms."""
    seconds = {"map": 10e-6, "set_access": 20e-6, "unmap": 5e-6}
    layer = [
        {"call": call, "bytes": PAGE, "count": 208, "load": "idle", "latency_s": each} for call, each in seconds.items()
    ]
    other = [{"call": "map", "bytes": 2**25, "count": 8, "load": "idle", "latency_s": 1e-3}]
    lines = _vmm([*layer, *other], None)
    assert "| 208 | 2 | idle | 6.24 | 1.04 |" in lines
    assert sum(line.startswith("| 8 |") for line in lines) == 0
    assert "### A layer of a model" not in _vmm(other, None)


def test_copies_are_reported() -> None:
    row = {"direction": "host_to_device", "host_memory": "pinned", "bytes": 4 * 10**8, "latency_s": 8e-3}
    assert "| host_to_device | pinned | 400 | 8 | 50 |" in _copy([row], None)


# --- what the documentation says --------------------------------------------------------------------------------------

PAGE_OF_PROBES = Path(__file__).parents[2] / "docs" / "probes.md"
ROW = re.compile(r"^\| ((?:more )?`[^|]+) \| [^|]+ \| ([\d.]+)(?:; in all (\d+))? \|$", re.MULTILINE)


def test_the_table_of_parts_is_the_plan() -> None:
    """Each part is named, and the minutes up to the sum, and those of shapes, are those of the plan."""
    rows = ROW.findall(PAGE_OF_PROBES.read_text(encoding="utf-8"))
    named = [text for names, *_ in rows for text in re.findall(r"`([^`]+)`", names)]
    parts = list(dict.fromkeys(item.part for item in ITEMS))
    assert [part for part in parts if not any(fnmatch(part, text) for text in named)] == []
    minutes = {line.split()[0]: float(line.split()[-2]) for line in plan_lines(ITEMS)[1:]}
    (stated,) = (float(each) for names, each, _ in rows if names.startswith("`shapes`"))
    assert stated == minutes["shapes"]
    (so_far,) = (float(total) for *_, total in rows if total)
    assert abs(so_far - float(plan_lines(ITEMS)[parts.index("steps-bfloat16-eager") + 1].split()[-1])) < 0.5
    assert sum(float(each) for _, each, _ in rows) == pytest.approx(sum(minutes.values()), abs=1.0)
